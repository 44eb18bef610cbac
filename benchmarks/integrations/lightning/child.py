"""What each process of the benchmark runs."""

from benchmarks.integrations.launch import answer
from benchmarks.integrations.lightning.errors import errors
from benchmarks.integrations.lightning.speed import pairs

if __name__ == "__main__":
    answer(errors, pairs)
