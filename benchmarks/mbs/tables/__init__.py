"""MBS's tables 1 to 5 and its Figure 3, at a size for two cores, and as they are for a GPU."""
