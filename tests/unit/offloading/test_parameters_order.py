from __future__ import annotations

import random

from anybatch.offloading.parameters import Order


def test_the_next_use_is_that_of_the_step_before() -> None:
    rng = random.Random(0)
    for _ in range(100):
        step = [rng.choice("abcd") for _ in range(rng.randint(1, 12))]
        step = [x for i, x in enumerate(step) if i == 0 or step[i - 1] != x]
        order = Order()
        for item in step:
            assert order.next(item) == 0  # nothing is known
            order.used(item)
        order.ended()
        assert [order[i] for i in range(len(order))] == step
        twice = step + step
        for place, item in enumerate(step):
            assert order.at == place
            for other in "abcd":
                later = [i for i, x in enumerate(twice) if i >= place and x == other]
                assert order.next(other) == (later[0] if later else 2 * len(step))
            order.used(item)


def test_uses_that_are_left_out_are_passed_over_and_strange_ones_are_none() -> None:
    order = Order()
    for item in "abcabd":
        order.used(item)
    order.ended()
    for item, at in (("c", 3), ("x", 3), ("c", 3), ("d", 6), ("a", 6)):
        order.used(item)
        assert order.at == at
    order.ended()
    assert [order[i] for i in range(len(order))] == list("cxcda")
