"""The table of first steps."""

from benchmarks.mbs.rows import Results, markdown

COLUMNS = (
    ("first_ms", "first step, ms"),
    ("second_ms", "second step, ms"),
    ("forward_ms", "a forward of 4 samples, ms"),
    ("more_in_steps", "(first - second) / second"),
    ("more_in_forwards", "(first - second) / forward of 4"),
    ("second_by_hand", "second / loop by hand"),
)
SUMMARY = (
    ("first_ms", "first step, ms"),
    ("second_ms", "a later step, ms"),
    ("second_by_hand", "a later step / loop by hand"),
)


def first_step_summary(results: Results) -> str:
    """What the first step and a later one of each network take."""
    return first_step(results, SUMMARY)


def first_step(results: Results, columns: tuple[tuple[str, str], ...] = COLUMNS) -> str:
    """What the first step of each network takes, beside its second one and plain forwards."""
    rows = [
        [name, *(f"{row[key]:.3g}" for key, _ in columns)]
        for name, row in results["networks"].items()
    ]
    return markdown(["network", *(head for _, head in columns)], rows)
