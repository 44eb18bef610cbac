"""The first step under a budget beside later ones, and the first fifty beside the best size."""
