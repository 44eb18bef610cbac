"""How large a system is worth it: mini-batch and algorithms, GPUs, parameter servers."""
