"""Lightning's own accumulation beside `FullBatch`."""
