from __future__ import annotations

from anybatch.core.barrier import looking, looks_here


def test_an_inspection_that_is_never_left_is_over_with_the_one_around_it() -> None:
    """An interrupt comes just before its end."""
    entered = looking()
    with looking():
        entered.__enter__()
    del entered
    assert not looks_here()
