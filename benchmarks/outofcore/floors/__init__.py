"""The least memory of one sample, beside what other libraries offer."""
