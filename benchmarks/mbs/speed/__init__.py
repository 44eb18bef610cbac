"""Speed of one forward and backward against the best loop by hand."""
