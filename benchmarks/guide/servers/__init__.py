"""How many parameter servers hide their traffic: Lemma 3.2, its simulation, and real processes."""
