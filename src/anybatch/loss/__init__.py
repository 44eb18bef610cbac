"""A loss as numerator over denominator: declared, known from torch, or watched once."""
