from __future__ import annotations

from torch import nn

from anybatch.execution.full_batch_rng.mode import Site, site


class Says(nn.Module):
    """Says where it is called."""

    def __init__(self, recognised: set[int]) -> None:
        super().__init__()
        self.recognised = recognised

    def forward(self) -> Site:
        return site(self.recognised)


def test_a_place_is_recognised_and_distinguished_from_others() -> None:
    recognised: set[int] = set()
    one, other = Says(recognised), Says(recognised)
    recognised |= {id(one), id(other)}
    first, again = (one() for _ in range(2))
    assert first.chain == again.chain
    places = [module().chain for module in (one, other, one)]
    assert places[0] == places[2] != places[1]
    assert one().chain != one().chain
    assert first.words.startswith("test_mode_site.py, line ")


def test_modules_that_are_made_anew_are_the_same_place() -> None:
    places = [Says(set())() for _ in range(2)]
    assert places[0].chain == places[1].chain
