"""Couplings that the first rows, the first step or a known function hide: none is called exact.

Each form was once shown and wrong. A few steps follow one path of parameters beside the undivided
batch; at each of them the step is refused, or not shown, or exact in float64. What is honest beside
them stays shown.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from anybatch import Engine
from anybatch.errors import AnybatchError
from anybatch.tools.exactness import error_of

FEATURES, WIDTH, CLASSES = 6, 5, 3
BOUND = 1e-12
Form = Callable[[Any, Tensor], Tensor]
FORMS: dict[str, Form] = {}


def form(fn: Form) -> Form:
    FORMS[fn.__name__.strip("_")] = fn
    return fn


class Net(nn.Module):
    """Two layers, and between them what is given."""

    def __init__(self, between: Form) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.table = nn.Parameter(torch.randn(64, WIDTH))
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)
        self.zeros, self.ones = torch.zeros(WIDTH).double(), torch.ones(WIDTH).double()
        self.averages = [p.detach().clone().double() for p in self.first.parameters()]
        self.moved, self.counts = torch.zeros(WIDTH).double(), torch.zeros(WIDTH).long()
        with torch.inference_mode():
            self.buffered = torch.ones(WIDTH).double()
        self.rng, self.coins = random.Random(0), np.random.default_rng(0)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n, 3]."""
        self.last_input = x
        found: Tensor = self.last(self.between(self, self.first(x).tanh()))
        return found


def rows(n: int, step: int) -> tuple[Tensor, Tensor]:
    """Rows of which three that come late are large."""
    rng = torch.Generator().manual_seed(step)
    x = 0.01 * torch.randn(n, FEATURES, generator=rng, dtype=torch.float64)
    x[-1], x[-3], x[n // 2] = 30, 25, 20
    return x, torch.randint(0, CLASSES, (n,), generator=rng)


def judged(
    make: Callable[[], tuple[nn.Module, Any]],
    n: int,
    micro_batch: int,
    steps: int = 2,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    data: Callable[[int, int], tuple[Any, Tensor]] = rows,
) -> bool:
    """Say whether every step was shown; fail where one was that is wrong."""
    torch.manual_seed(0)
    plain, full = make()
    torch.manual_seed(0)
    model, loss_fn = make()
    engine, shown = Engine(model, loss_fn, micro_batch=micro_batch), True
    for step in range(steps):
        x, y = data(n, step)
        plain.zero_grad()
        model.zero_grad()
        with around():
            want = full(plain(*x) if isinstance(x, tuple) else plain(x), y)
            want.backward()
        try:
            with around():
                got = engine.backward(x, y)
        except AnybatchError:
            return False
        assert engine.plan is not None
        states = [
            {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
            for one in (model, plain)
        ]
        off = error_of(states[0] | {"loss": got}, states[1] | {"loss": want.detach()})
        shown &= bool(engine.plan.exact)
        assert not engine.plan.exact or max(off.values()) <= BOUND, (step, off)
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if theirs.grad is not None:
                    theirs.sub_(0.05 * theirs.grad)
                    ours.copy_(theirs)
    return shown


# ------------------------------------------------- more rows than were looked at take another way


@form
def normalised_from_five_rows(_: Any, h: Tensor) -> Tensor:
    return h - h.mean(0) if len(h) > 4 else h


@form
def turned_from_five_rows(_: Any, h: Tensor) -> Tensor:
    return h + 0.1 * h.flip(0) if h.shape[0] > 4 else h


@form
def places_from_five_rows(_: Any, h: Tensor) -> Tensor:
    return h if h.size(0) < 5 else h + torch.arange(len(h))[:, None] * 0.1


@form
def another_constant(net: Any, h: Tensor) -> Tensor:
    return h + (net.ones if len(h) > 4 else net.zeros)


@form
def another_constant_outside_the_model(_: Any, h: Tensor) -> Tensor:
    return h + CONSTANTS[len(h) > 4]


CONSTANTS = torch.zeros(WIDTH).double(), torch.ones(WIDTH).double()


# ------------------------------------------------- sizes that are read where little is heard


@form
def size_of_a_parameter_of_its_own(_: Any, h: Tensor) -> Tensor:
    return h - 0.1 * h.mean(0) if nn.Parameter(torch.empty_like(h)).size(0) > 4 else h


@form
def compared_shapes(_: Any, h: Tensor) -> Tensor:
    return h - 0.1 * h.mean(0) if h.is_same_size(torch.empty(13, WIDTH)) else h


@form
def compared_zeros(_: Any, h: Tensor) -> Tensor:
    like = torch.zeros(13, WIDTH, dtype=h.dtype)
    return h - 0.1 * h.mean(0) if torch.equal(torch.zeros_like(h), like) else h


@form
def tried_shapes(_: Any, h: Tensor) -> Tensor:
    try:
        torch.zeros(13, WIDTH).expand_as(h)
    except RuntimeError:
        return h
    return h - 0.1 * h.mean(0)


@form
def called_back(_: Any, h: Tensor) -> Tensor:
    def distance(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().sum(-1) * (0.5 if len(a) > 4 else 1.0)

    found = F.triplet_margin_with_distance_loss(
        h, h * 2, h * 0.5 + 1, distance_function=distance, reduction="none", margin=3.0
    )
    return h * found[:, None]


# ------------------------------------------------- places that samples choose together


def together(h: Tensor) -> Tensor:
    """One number of all samples: 0 for those that are looked at."""
    return (h.abs().amax() > 0.9).long()


@form
def one_hot_of_all(_: Any, h: Tensor) -> Tensor:
    return h * (1 + F.one_hot(together(h), 2)[1])


@form
def one_hot_by_a_mean(_: Any, h: Tensor) -> Tensor:
    chosen = (h[:, 0] > h[:, 0].mean() + 0.5).long()
    return h * (1 + F.one_hot(chosen, 2)[:, 1:])


@form
def scattered_by_all(_: Any, h: Tensor) -> Tensor:
    return h * (1 + h.new_zeros(2).scatter(0, together(h)[None], 1.0)[1])


@form
def added_by_all(_: Any, h: Tensor) -> Tensor:
    return h * (1 + h.new_zeros(2).index_add(0, together(h)[None], h.new_ones(1))[1])


@form
def filled_by_all(_: Any, h: Tensor) -> Tensor:
    return h * (1 + h.new_zeros(2).index_fill(0, together(h)[None], 1.0)[1])


@form
def copied_by_all(_: Any, h: Tensor) -> Tensor:
    return h * (1 + h.new_zeros(2).index_copy(0, together(h)[None], h.new_ones(1))[1])


@form
def put_by_all(_: Any, h: Tensor) -> Tensor:
    return h * (1 + h.new_zeros(2).put(together(h)[None], h.new_ones(1))[1])


# ------------------------------------------------- rows of which none is chosen at first


def large(h: Tensor) -> Tensor:
    return h.abs().amax(1) > 0.9


@form
def loop_over_chosen(_: Any, h: Tensor) -> Tensor:
    for _at in large(h).nonzero():
        h = h + 0.1 * h.mean(0)
    return h


@form
def each_chosen_row(_: Any, h: Tensor) -> Tensor:
    for row in h[large(h)]:
        h = h + 0.1 * row
    return h


@form
def counted_parts(_: Any, h: Tensor) -> Tensor:
    return h * (1.0 + len(large(h).nonzero().split(1)))


@form
def written_to_a_table(_: Any, h: Tensor) -> Tensor:
    table, at = h.new_zeros(3, WIDTH), large(h).nonzero()[:, 0]
    table[at * 0] = h[at]
    return h + table[0]


@form
def added_to_a_table(_: Any, h: Tensor) -> Tensor:
    at = large(h).nonzero()[:, 0]
    return h + h.new_zeros(3, WIDTH).index_add_(0, at * 0, h[at])[0]


@form
def products_of_chosen(_: Any, h: Tensor) -> Tensor:
    chosen = h[large(h)]
    return h + (chosen.T @ chosen).sum()


@form
def chosen_next_to_zeros(_: Any, h: Tensor) -> Tensor:
    chosen = torch.cat([h.new_zeros(1), torch.ones_like(h[large(h)][:, 0])])
    return h + chosen.max()


@form
def chosen_and_padding(_: Any, h: Tensor) -> Tensor:
    return h + F.pad(large(h).nonzero().to(h) * 0, (0, 0, 0, 1), value=1.0).mean()


@form
def turned_after_it_was_written(_: Any, h: Tensor) -> Tensor:
    found, at = torch.zeros_like(h), large(h).nonzero()[:, 0]
    found[at] = h[at] * 2
    return h + found.flip(0) * 0.1


# ------------------------------------------------- places of rows


@form
def halves_of_places(net: Any, h: Tensor) -> Tensor:
    n = len(h)
    few = min(n, 32)
    return h + net.table[F.pad(torch.arange(few) // 5, (0, n - few))]


@form
def halves_of_places_in_place(net: Any, h: Tensor) -> Tensor:
    return h + net.table[torch.arange(len(h)).floor_divide_(5)]


@form
def sorted_next_to_unsorted(_: Any, h: Tensor) -> Tensor:
    order = (h[:, 0] > 9).long().argsort(descending=True, stable=True)
    found: Tensor = (h[order] * h.tanh())[order.argsort()]
    return found


# ------------------------------------------------- what each call moves


@form
def teacher_by_assignment(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        for k, q in zip(net.teacher.parameters(), net.first.parameters(), strict=True):
            k.data = 0.9 * k.data + 0.1 * q.data
    return h + net.teacher(net.last_input)


@form
def teacher_by_new_parameters(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        new = 0.9 * net.teacher.weight + 0.1 * net.first.weight
        net.teacher.weight = nn.Parameter(new, requires_grad=False)
    return h + net.teacher(net.last_input)


@form
def averages_in_a_list(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        pairs = zip(net.averages, net.first.parameters(), strict=True)
        net.averages = [0.9 * k + 0.1 * q for k, q in pairs]
    return h + F.linear(net.last_input, *net.averages)


@form
def constant_that_moves(net: Any, h: Tensor) -> Tensor:
    net.moved.add_(0.1)
    return h + torch.relu(net.moved - 0.35)


@form
def counts_that_move(net: Any, h: Tensor) -> Tensor:
    net.counts.add_(1)
    return h * (1 + (net.counts > 4))


@form
def coin_of_python(net: Any, h: Tensor) -> Tensor:
    return h * 2 if net.rng.random() < 0.2 else h


@form
def coin_of_numpy(net: Any, h: Tensor) -> Tensor:
    return h * 2 if net.coins.random() < 0.2 else h


@form
def numbers_passed_to_python(_: Any, h: Tensor) -> Tensor:
    observed: list[float] = []
    copied = h.detach().clone()

    def sums(value: float) -> float:
        observed.append(value)
        return sum(observed[:-1]) if len(observed) > 21 else 0.0

    copied.apply_(sums)
    return h + 0.01 * copied


@pytest.mark.product
@pytest.mark.parametrize(("n", "micro_batch"), [(13, 8), (13, 4), (8, 2)])
@pytest.mark.parametrize("name", FORMS)
def test_no_form_is_shown_and_wrong(name: str, n: int, micro_batch: int) -> None:
    def make() -> tuple[nn.Module, Any]:
        return Net(FORMS[name]).double(), F.cross_entropy

    assert not judged(make, n, micro_batch, steps=4) or n == 8


class Own(torch.autograd.Function):
    """The identity, whose backward is the function that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.back = back
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.back(grads[0], (x[:, :1] - 7).relu()), None


APPLY: Any = Own.apply
BACKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda g, gate: g + (gate * g).mean(0),
    "sum": lambda g, gate: g + (gate * g).sum(0),
    "turned": lambda g, gate: g + gate.sign() * g.flip(0),
    "a little": lambda g, gate: g + 1e-8 * g.mean(0) + 0 * gate,
}


class Entries(nn.Module):
    """Entries of a table, which no gradient leads back to rows of numbers."""

    def __init__(self, back: Any) -> None:
        super().__init__()
        self.table, self.last, self.back = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, CLASSES), back
        self.table.weight.data[6] = 9

    def forward(self, at: Tensor) -> Tensor:
        """[n] -> [n, 3]."""
        found: Tensor = self.last((APPLY(self.table(at), self.back) / 9).tanh())
        return found


@pytest.mark.parametrize("name", BACKS)
def test_an_own_backward_behind_a_table_is_not_shown_where_rows_meet_in_it(name: str) -> None:
    def data(n: int, step: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(step)
        at = torch.randint(0, 5, (n,), generator=rng)
        at[-1] = 6
        return at, torch.randint(0, CLASSES, (n,), generator=rng)

    assert not judged(lambda: (Entries(BACKS[name]).double(), F.cross_entropy), 13, 4, data=data)


def rounded(tensor: Tensor) -> Any:
    scale = tensor.detach().abs().max() / 127 if tensor.is_floating_point() else None
    return tensor if scale is None else ((tensor.detach() / scale).round(), scale)


def restored(packed: Any) -> Any:
    return packed if isinstance(packed, Tensor) else packed[0] * packed[1]


def test_hooks_on_saved_tensors_around_a_step_are_no_proof() -> None:
    def around() -> AbstractContextManager[Any]:
        return saved_tensors_hooks(rounded, restored)

    def make() -> tuple[nn.Module, Any]:
        return Net(lambda _, h: h.sin() * h.cos()).double(), F.cross_entropy

    assert not judged(make, 8, 2, around=around)


def test_a_loss_that_iterates_is_not_shown() -> None:
    def steps() -> Iterator[float]:
        yield from (0.05 * i for i in range(1000))

    def make() -> tuple[nn.Module, Any]:
        smoothing = steps()
        return Net(lambda _, h: h).double(), lambda out, y: F.cross_entropy(
            out, y, label_smoothing=next(smoothing)
        )

    assert not judged(make, 8, 2, steps=3)


def masked(net: Any, h: Tensor) -> Tensor:
    """A constant that is made anew by each call, and read by none."""
    net.mask = torch.ones(WIDTH, WIDTH, dtype=h.dtype).tril()
    return h @ net.mask


def shape_of_meta(_: Any, h: Tensor) -> Tensor:
    return h * h.detach().to("meta").shape[1]


def rebuilt(net: Any, h: Tensor) -> Tensor:
    """A weight that is computed anew before it is read."""
    net.weight = net.table[:WIDTH] / net.table[:WIDTH].norm()
    return h @ net.weight


def of_inference(net: Any, h: Tensor) -> Tensor:
    return h + net.buffered.clone()


@pytest.mark.parametrize("between", [masked, shape_of_meta, rebuilt, of_inference])
def test_what_is_honest_stays_shown(between: Form) -> None:
    assert judged(lambda: (Net(between).double(), F.cross_entropy), 13, 4, steps=3)


# ------------------------------------------------- rows in an order of their lengths

STEPS_OF_TIME = 5
Sequences = Callable[[Any, PackedSequence, Tensor], Tensor]
PACKED: dict[str, tuple[Sequences, bool]] = {}


def packed(*, honest: bool) -> Callable[[Sequences], Sequences]:
    def note(fn: Sequences) -> Sequences:
        PACKED[fn.__name__.strip("_")] = fn, honest
        return fn

    return note


class Recurrent(nn.Module):
    """Words of uneven length, packed; between them and the outputs what is given."""

    def __init__(self, between: Sequences) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(11, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.last, self.between = nn.Linear(WIDTH, CLASSES), between

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """[n, t], [n] -> [n, t, 3]."""
        every = self.words(words)
        rows = pack_padded_sequence(every, lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.last(self.between(self, rows, every))
        return found


def like(rows: PackedSequence, data: Tensor) -> PackedSequence:
    return PackedSequence(data, rows.batch_sizes, rows.sorted_indices, rows.unsorted_indices)


def padded(rows: PackedSequence) -> Tensor:
    return pad_packed_sequence(rows, batch_first=True, total_length=STEPS_OF_TIME)[0]


@packed(honest=True)
def plain_rnn(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    return padded(net.rnn(rows)[0])


@packed(honest=True)
def last_state(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    state: Tensor = net.rnn(rows)[1][-1]
    return state[:, None].expand(-1, STEPS_OF_TIME, -1)


@packed(honest=True)
def rows_by_themselves(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    return padded(net.rnn(like(rows, F.layer_norm(rows.data, (WIDTH,))))[0])


@packed(honest=True)
def state_of_each(net: Any, rows: PackedSequence, every: Tensor) -> Tensor:
    return padded(net.rnn(rows, every.mean(1)[None].contiguous())[0])


@packed(honest=True)
def decoder(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    return padded(net.rnn(rows, net.rnn(rows)[1])[0])


@packed(honest=False)
def mean_of_packed(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    return padded(net.rnn(like(rows, rows.data - rows.data.mean(0)))[0])


@packed(honest=False)
def first_of_packed(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    return padded(net.rnn(like(rows, rows.data - rows.data[:1]))[0])


@packed(honest=False)
def turned_packed(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    return padded(net.rnn(like(rows, rows.data + 0.1 * rows.data.roll(1, 0)))[0])


@packed(honest=False)
def number_of_rows(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    return padded(net.rnn(rows)[0]) / len(rows.data)


@packed(honest=False)
def number_of_sequences(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    return padded(net.rnn(rows)[0]) / rows.batch_sizes[0]


@packed(honest=False)
def one_long_sequence(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    ones = torch.ones(len(rows.data), dtype=torch.int64)
    return padded(like(rows, net.rnn(PackedSequence(rows.data, ones))[0].data))


@packed(honest=False)
def state_of_the_first(net: Any, rows: PackedSequence, every: Tensor) -> Tensor:
    state = net.rnn(rows)[1][:, :1].expand(-1, len(every), -1).contiguous()
    return padded(net.rnn(rows, state)[0])


@packed(honest=False)
def states_in_another_order(net: Any, rows: PackedSequence, every: Tensor) -> Tensor:
    state = every.mean(1)[None].contiguous()
    return padded(like(rows, net.rnn(PackedSequence(rows.data, rows.batch_sizes), state)[0].data))


@packed(honest=False)
def states_left_in_order(net: Any, rows: PackedSequence, _: Tensor) -> Tensor:
    state: Tensor = net.rnn(PackedSequence(rows.data, rows.batch_sizes))[1][-1]
    return state[:, None].expand(-1, STEPS_OF_TIME, -1)


LENGTHS = {
    "mixed": [5, 3, 1, 4, 2, 5, 3],
    "alike": [5] * 7,
    "falling": [5, 4, 4, 3, 3, 2, 1],
}


@pytest.mark.large(few=7)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_followed(name: str, lengths: str) -> None:
    """At the second step lengths are mixed: that they were alike at the first was chance."""
    between, honest = PACKED[name]

    def data(n: int, step: int) -> tuple[Any, Tensor]:
        rng = torch.Generator().manual_seed(step)
        words = torch.randint(0, 11, (n, STEPS_OF_TIME), generator=rng)
        row_lengths = torch.tensor(LENGTHS["mixed" if step else lengths])
        return (words, row_lengths), torch.randint(0, CLASSES, (n, STEPS_OF_TIME), generator=rng)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    def make() -> tuple[nn.Module, Any]:
        return Recurrent(between).double(), loss

    for micro_batch in (1, 3):
        assert judged(make, 7, micro_batch, data=data) is honest
