"""Vocabulary heads and their losses, at once and in chunks of rows."""
