"""A small residual network on a part of CIFAR-10, with its learning curves."""
