"""A contrastive loss of the full batch, over micro-batches and ranks, without its N x N matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.oracle import assert_exact, error_of, state_after, tolerance
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.core.batch import MicroBatch
from anybatch.errors import BudgetError, LossError
from anybatch.loss import contrastive

N, D = 22, 4
SIZES = (13, 0, 9)
"""Samples of each rank."""
KINDS = {
    "InfoNCE": {"temperature": 0.3},
    "CLIP": {"symmetric": True},
    "NT-Xent": {"symmetric": True, "within": True},
    "hard negatives": {"temperature": 0.5, "symmetric": True},
    "stacked": {"within": True},
}


class Two(nn.Module):
    """Two encoders; what they return goes by the name of the loss. `norm` lets samples meet."""

    def __init__(self, variant: str, *, norm: bool = False) -> None:
        super().__init__()
        self.variant = variant
        self.one, self.other = nn.Linear(6, D), nn.Linear(5, D)
        self.norm = nn.BatchNorm1d(D) if norm else nn.Identity()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z, w = self.norm(self.one(x).tanh()), self.norm(self.other(y))
        if self.variant == "hard negatives":
            return z, w, self.other(y.flip(1)).tanh()
        if self.variant == "stacked":
            return torch.stack([z, w, z * w], 1)
        if self.variant == "CLIP":
            return {"image": F.normalize(z), "text": F.normalize(w), "s": self.logit_scale.exp()}
        return (z, w, self.logit_scale.exp()) if self.variant == "NT-Xent" else (z, w)


def written(variant: str) -> Callable[[Any], Tensor]:
    """Return the loss as a person writes it, with its matrices."""
    inputs: dict[str, Any] = KINDS[variant]
    within, symmetric = "within" in inputs, "symmetric" in inputs

    def search(z: Tensor, w: Tensor, others: list[Tensor]) -> Tensor:
        found = [z @ w.T, *(z @ other.T for other in others)]
        if within:
            found.append((z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf))
        return F.cross_entropy(torch.cat(found, 1), torch.arange(len(z)))

    def loss(out: Any) -> Tensor:
        out = list(out.values() if isinstance(out, dict) else out)
        scale = out.pop() if out[-1].dim() == 0 else 1 / inputs.get("temperature", 1.0)
        z, w, *others = (embeddings * scale**0.5 for embeddings in out)
        one = search(z, w, others)
        return (one + search(w, z, [])) / 2 if symmetric else one

    return (lambda out: loss(out.unbind(1))) if variant == "stacked" else loss


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(N, 6).double(), torch.randn(N, 5).double()


def make(variant: str, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return Two(variant, norm=norm).double()


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


def two_steps(step: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
    def run(copied: nn.Module) -> Tensor:
        for _ in range(2):
            copied.zero_grad()
            loss = step(copied)
            descend(copied)
        return loss

    return run


def truth(variant: str, *, norm: bool = False) -> dict[str, Tensor]:
    def step(copied: nn.Module) -> Tensor:
        loss = written(variant)(copied(*batch()))
        loss.backward()
        return loss

    return state_after(make(variant, norm=norm), two_steps(step))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive, "SIDE", 5)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 8, 22])
@pytest.mark.parametrize("variant", KINDS)
def test_it_is_the_loss_of_the_full_batch(variant: str, micro_batch: int, norm: bool) -> None:
    engines = []

    def run(copied: nn.Module) -> Tensor:
        engines.append(
            Engine(copied, anybatch.contrastive(**KINDS[variant]), micro_batch=micro_batch)
        )
        return two_steps(lambda _: engines[0].backward(batch()))(copied)

    assert_exact(state_after(make(variant, norm=norm), run), truth(variant, norm=norm))
    (engine,) = engines
    assert engine.plan is not None
    divided = "lockstep" if norm else "two-pass"
    assert engine.plan.mechanism == (divided if micro_batch < N else "undivided")


@pytest.mark.parametrize("variant", KINDS)
def test_evaluate_says_the_same_and_one_sample_will_do(variant: str) -> None:
    model, (x, y) = make(variant), batch()
    engine = Engine(model, anybatch.contrastive(**KINDS[variant]), micro_batch=4)
    for rows in (slice(None), slice(1)):
        want = written(variant)(model(x[rows], y[rows])).detach()
        found = engine.evaluate((x[rows], y[rows]))
        assert_exact({"loss": found + 1}, {"loss": want + 1})  # of one sample it may be 0


def rows_of(rank: int) -> slice:
    return slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))


def on_rank(rank: int, size: int, variant: str, micro_batch: int, norm: bool) -> Any:
    contrastive.SIDE = 5
    own, (x, y) = rows_of(rank), batch()

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, anybatch.contrastive(**KINDS[variant]), micro_batch=micro_batch)
        found = two_steps(lambda _: engine.backward((x[own], y[own])))(copied)
        copied.eval()
        with torch.no_grad():
            want = written(variant)(copied(x, y))
        assert_exact({"loss": engine.evaluate((x[own], y[own]))}, {"loss": want})
        return found

    return state_after(make(variant, norm=norm), run)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(len(SIZES), fresh=True) as found:
        yield found


@pytest.mark.large(few=3)
@pytest.mark.parametrize(("micro_batch", "norm"), [(3, False), (22, False), (4, True)])
@pytest.mark.parametrize("variant", KINDS)
def test_negatives_are_those_of_all_ranks(
    pool: Pool, variant: str, micro_batch: int, norm: bool
) -> None:
    want = truth(variant, norm=norm)
    found = pool.run(on_rank, variant, micro_batch, norm)
    for got in found:
        assert_exact(got, want)
        assert all(torch.equal(got[name], found[0][name]) for name in got)


def counted(rank: int, size: int) -> tuple[list[int], int]:
    """Count what a second step sends: numbers in every sum over ranks, and tiles computed here."""
    contrastive.SIDE = contrastive.LEAST = 1
    x, y = (t[rows_of(rank)] for t in batch())
    engine = Engine(make("CLIP"), anybatch.contrastive(symmetric=True), micro_batch=4)
    engine.backward((x, y))
    with (
        mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduced,
        mock.patch.object(contrastive, "_similar", side_effect=contrastive._similar) as computed,
    ):
        engine.backward((x, y))
    return [call.args[0].numel() for call in reduced.call_args_list], computed.call_count


def test_a_step_sums_gradients_once_and_each_rank_takes_its_rows(pool: Pool) -> None:
    parameters = sum(p.numel() for p in make("CLIP").parameters())
    for size, (reduced, computed) in zip(SIZES, pool.run(counted), strict=True):
        assert reduced == [parameters]
        assert computed == 4 * size * N  # both directions, forward and backward


def encoder() -> nn.Module:
    """Return two encoders that hold much for each sample, and return little."""
    torch.manual_seed(0)

    def one() -> nn.Module:
        parts = [nn.Conv1d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv1d(8, 8, 3, padding=1), nn.Tanh()]
        return nn.Sequential(*parts, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, D))

    def both(f: nn.Module, g: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(f(x)), F.normalize(g(y))

    return anybatch.joint(both, one(), one())


def held(loss: Any, rows: int, n: int, memory: Any) -> tuple[int, int]:
    """Return peak and prediction of a first step in micro-batches of n."""
    torch.manual_seed(1)
    engine = Engine(encoder(), loss, micro_batch=n, memory=memory)
    engine.backward((torch.randn(rows, 1, 64), torch.randn(rows, 1, 64)))
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.predicted_bytes is not None
    return engine.last.peak_bytes, engine.last.predicted_bytes


@pytest.mark.parametrize("options", [{}, {"symmetric": True, "within": True}], ids=["one", "all"])
def test_a_batch_of_512_in_the_memory_of_64(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contrastive, "SIDE", 512)
    loss = anybatch.contrastive(temperature=0.1, **options)
    most, predicted = held(loss, 64, 64, "1GiB")
    assert most == predicted
    peak, predicted = held(loss, 512, 16, most)
    assert peak <= predicted <= most
    with pytest.raises(BudgetError):  # the similarities alone are more
        held(written("InfoNCE"), 512, 1, most)


def test_half_precision_is_computed_in_float32() -> None:
    z, w = (F.normalize(torch.randn(40, D)).bfloat16().requires_grad_() for _ in range(2))
    loss = anybatch.contrastive(temperature=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss.full_batch((z, w), MicroBatch(None, None, 40))
    found.backward()
    assert found.dtype == torch.float32
    assert z.grad is not None
    full = F.cross_entropy(z.detach().double() @ w.detach().double().T * 20, torch.arange(40))
    assert abs(found.item() - full.item()) <= 1e-5 * full.item()


def embedded(variant: str, n: int) -> tuple[Tensor, Tensor]:
    """Return [n, 16] in float32, as a training meets them: at first alike, at its end apart."""
    x, noise = torch.randn(n, 16), torch.randn(n, 16)
    if variant == "found":
        return F.normalize(x), F.normalize(x + 0.1 * noise)
    if variant == "not found":
        return F.normalize(x), F.normalize(x.roll(1, 0) + 0.1 * noise)
    if variant == "as drawn":
        return F.normalize(x), F.normalize(noise)
    if variant == "alike":
        return 1 + 1e-3 * x, 1 + 1e-3 * noise
    return (torch.ones(n, 16),) * 2 if variant == "equal" else (x, x + 0.3 * noise)


def matrices(z: Tensor, w: Tensor, scale: Tensor, options: dict[str, bool]) -> Tensor:
    """Return the loss by torch's cross-entropy; in float64 by what stands against each partner.

    log(1 + sum_j exp(x_ij - x_ii)) keeps its digits where the first is 1e-20.
    """
    own = torch.eye(len(z), dtype=torch.bool)

    def search(z: Tensor, w: Tensor) -> Tensor:
        within = [(scale * z @ z.T).masked_fill(own, -torch.inf)] * ("within" in options)
        if z.dtype == torch.float32:
            return F.cross_entropy(torch.cat([scale * z @ w.T, *within], 1), torch.arange(len(z)))
        others = torch.cat([(scale * z @ w.T).masked_fill(own, -torch.inf), *within], 1)
        true = scale * (z * w).sum(1, keepdim=True)
        return -F.logsigmoid(-torch.logsumexp(others - true, 1)).mean()

    return (search(z, w) + search(w, z)) / 2 if "symmetric" in options else search(z, w)


def in_two(z: Tensor, w: Tensor, scale: Tensor, options: dict[str, bool]) -> Tensor:
    """Return the loss as two ranks have it, of which the first computes all but two rows."""
    loss, cuts, found = anybatch.contrastive(**options), [(0, len(z) - 2), (len(z) - 2, len(z))], []

    def of(begin: int, stop: int, gather: Any) -> Tensor:
        own = z[begin:stop], w[begin:stop], scale
        return loss.of_rows(own, (z, w, scale), begin, MicroBatch(None, None, len(z)), gather)

    for cut in cuts:
        of(*cut, lambda rows: (found.append(rows), rows)[1])
    # each returns the loss of all, whose gradient is that of its rows
    parts = [of(*cut, lambda _: torch.cat(found)) for cut in cuts]
    return parts[0] + parts[1] - parts[1].detach()


def at_once(z: Tensor, w: Tensor, scale: Tensor, options: dict[str, bool]) -> Tensor:
    return anybatch.contrastive(**options).full_batch((z, w, scale), MicroBatch(None, None, len(z)))


def slopes(loss: Any, pair: tuple[Tensor, Tensor], scale: float, inputs: Any) -> dict[str, Tensor]:
    variables = (*pair, pair[0].new_tensor(scale))
    z, w, s = (tensor.clone().requires_grad_() for tensor in variables)
    value = loss(z, w, s, inputs)
    value.backward()
    return {"loss": value.detach(), "z": z.grad, "w": w.grad, "scale": s.grad}


@pytest.mark.product
@pytest.mark.parametrize("ours", [at_once, in_two])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.1, 0.05, 0.02, 0.01, 0.005])
def test_in_float32_it_is_as_exact_as_torch(
    temperature: float, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logarithms of sums of e^20 had no digits left for a loss of 1e-5: 2.6e-3 for 2.3e-6.

    Over ranks a similarity is computed on both sides, so it may be rounded twice; among embeddings
    that differ by 1e-3 that is much.
    """
    monkeypatch.setattr(contrastive, "SIDE", 20)
    kinds = {"found", "not found", "as drawn", "alike", "equal", "not normalised"}
    for variant in sorted(kinds - ({"alike"} if ours is in_two else set())):
        noise, worst = {"torch": 0.0, "rounded": 0.0}, 0.0
        for n, seed in ((3, 0), (3, 1), (30, 2), (77, 3)):
            torch.manual_seed(seed)
            pair = embedded(variant, n)
            if ours is in_two:
                most = float((pair[0] @ pair[1].T).abs().max() / temperature)
                noise["rounded"] = max(noise["rounded"], most * torch.finfo(torch.float32).eps)
            for options in ({}, {"symmetric": True}, {"symmetric": True, "within": True}):
                wide = pair[0].double(), pair[1].double()
                want = slopes(matrices, wide, 1 / temperature, options)
                found = slopes(matrices, pair, 1 / temperature, options)
                noise["torch"] = max(noise["torch"], *error_of(found, want).values())
                found = slopes(ours, pair, 1 / temperature, options)
                worst = max(worst, *error_of(found, want).values())
        assert worst <= tolerance(noise), (variant, worst, noise)


@pytest.mark.parametrize("ours", [at_once, in_two])
def test_a_loss_of_1e_8_has_all_digits_that_its_similarities_have(ours: Any) -> None:
    """The share of the partner is 1 in float32, and torch's gradient of it 0."""
    torch.manual_seed(0)
    pair, scale = embedded("found", 30), 1 / 0.02
    for options in ({}, {"symmetric": True}, {"symmetric": True, "within": True}):
        want = slopes(matrices, (pair[0].double(), pair[1].double()), scale, options)
        assert want["loss"] < 1e-8
        rounded = {"a similarity": scale * torch.finfo(torch.float32).eps}
        assert_exact(slopes(ours, pair, scale, options), want, rounded)


SAID: list[tuple[Any, str]] = [
    (lambda x, y: (x, y), r"two or more embeddings of one shape.*\(4, 6\) of float64, \(4, 5\)"),
    (lambda x, y: x, r"returned \(4, 6\) of float64: return no more"),
    (lambda x, y: (x.sum(1), x.sum(1)), r"returned \(4,\) of float64, \(4,\) of float64"),
    (lambda x, y: (x, x, x.new_ones(()), x.new_ones(())), "a 0-dim scale at most"),
    (lambda x, y: (x, x, x.new_ones(())), "a scale while temperature is 0.5: leave one of them"),
]


@pytest.mark.parametrize(("returned", "words"), SAID, ids=range(len(SAID)))
def test_outputs_that_cannot_be_compared_are_refused(returned: Any, words: str) -> None:
    model = anybatch.joint(lambda f, x, y: returned(f(x), y), nn.Linear(6, 6).double())
    rows = tuple(t[:4] for t in batch())
    for micro_batch in (2, 4):
        engine = Engine(model, anybatch.contrastive(temperature=0.5), micro_batch=micro_batch)
        with pytest.raises(LossError, match=words):
            engine.backward(rows)


def test_targets_and_temperatures_that_are_none_are_refused() -> None:
    engine = Engine(make("InfoNCE"), anybatch.contrastive(), micro_batch=8)
    with pytest.raises(LossError, match=r"must have no targets.*leave them out"):
        engine.backward(batch(), torch.arange(N))
    with pytest.raises(ValueError, match=r"temperature must be above 0, and is 0"):
        anybatch.contrastive(temperature=0)
    learned: Any = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"temperature must be a number.*a parameter of the model"):
        anybatch.contrastive(temperature=learned)
