"""Whole trainings with large and long windows, by torch's convolutions and by ours."""
