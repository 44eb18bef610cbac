"""The page that a run or a plan leaves: data in, one HTML text out."""
