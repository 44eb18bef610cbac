"""The page of a run or a plan: data in, one HTML text out."""
