"""Steps whose memory depends on the values of their batch."""
