"""Networks of timm and MONAI: an engine and plain accumulation beside the undivided batch."""
