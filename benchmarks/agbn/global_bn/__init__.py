"""What BatchNorm over ranks costs beside local BatchNorm."""
