"""anybatch inside other people's training loops; each needs its library, an optional extra."""
