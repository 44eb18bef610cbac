"""Layouts of full-batch draws: which rules find them, over networks that draw in training."""
