"""Lightning's own accumulation beside `WholeBatch`."""
