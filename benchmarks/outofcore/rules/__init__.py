"""The rules by which saved tensors leave, alone and together."""
