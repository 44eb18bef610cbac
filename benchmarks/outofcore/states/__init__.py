"""A training whose states wait in a file, beside the same in memory, free and under a limit."""
