"""How many GPUs are worth it: Lemma 3.1 and the refined model beside real processes."""
