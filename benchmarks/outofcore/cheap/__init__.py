"""Out-of-core training: the tables of the paper of Hayakawa and Narihira."""
