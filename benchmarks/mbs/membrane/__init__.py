"""A U-Net on microscope images of membranes, with its learning curves."""
