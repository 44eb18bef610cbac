"""u-cuDNN: convolutions under a workspace limit."""
