"""What each process of the benchmark runs."""

from typing import Any

from benchmarks.integrations.accelerate.errors import errors
from benchmarks.integrations.accelerate.speed import pairs
from benchmarks.integrations.launch import answer


def of_errors(*seeds: str) -> Any:
    return errors(tuple(map(int, seeds)))


def of_speed(count: str) -> Any:
    return pairs(int(count))


if __name__ == "__main__":
    answer({"errors": of_errors, "speed": of_speed})
