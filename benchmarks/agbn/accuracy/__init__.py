"""AGBN's Figure 4: what global BatchNorm gains over local BatchNorm, by batch size and devices."""
