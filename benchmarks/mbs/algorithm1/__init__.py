"""The paper's Algorithm 1, word for word, and what it does to ragged batches."""
