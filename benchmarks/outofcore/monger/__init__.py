"""The largest batch of a network for segmentation, with and without a memory monger."""
