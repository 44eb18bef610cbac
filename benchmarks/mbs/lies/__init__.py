"""Five ways gradient accumulation lies: the scripts of docs/lies and what they print."""
