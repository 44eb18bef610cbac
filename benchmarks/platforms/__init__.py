"""What anybatch was run with."""
