"""The guide of Zou et al.: its own numbers, and its lemmas beside real processes."""
