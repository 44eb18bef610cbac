"""AGBN's Figure 5: the time that adaptive BatchNorm saves over one that is always global."""
