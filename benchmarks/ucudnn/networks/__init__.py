"""Whole training steps of networks, torch's beside those inside `anybatch.convolutions`."""
