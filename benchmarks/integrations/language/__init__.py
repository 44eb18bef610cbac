"""A language model on rows of uneven length, trained with and without the batch's own mean."""
