"""Random draws, each planned and trained in a process of its own under a hard limit."""
