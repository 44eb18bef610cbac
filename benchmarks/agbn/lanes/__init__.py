"""What exact BatchNorm in lanes costs, and what it holds."""
