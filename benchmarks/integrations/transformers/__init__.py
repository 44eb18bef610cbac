"""transformers.Trainer beside ours."""
