"""The first step of an engine beside its later ones."""
