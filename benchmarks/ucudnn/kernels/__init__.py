"""Convolution kernels and a network with large or long windows, beside torch's own."""
