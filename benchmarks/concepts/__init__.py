"""Pictures of real steps for the page of concepts."""
