"""What each process of the benchmark runs."""

from benchmarks.integrations.accelerate.errors import errors
from benchmarks.integrations.accelerate.speed import pairs
from benchmarks.integrations.launch import answer

if __name__ == "__main__":
    answer(errors, pairs)
