"""Encoders that do not meet before the loss: one graph at a time, and the gradient of the batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.limits.test_out_of_memory import Fault, Fuse, above, at
from tests.offloads import small_leave
from tests.oracle import assert_exact, same, snapshot, state_after, undivided
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import anybatch
from anybatch import Encoders, Engine, LazyBatch, Plan
from anybatch.errors import BatchError, NotExactError, NotReproducibleError
from anybatch.loss import contrastive as tiles
from anybatch.reports import Memory, OffloadPlan

N, D, WIDTH = 22, 4, 6
SIZES = (13, 0, 9)
"""Samples of each rank."""


class Encoder(nn.Module):
    """A small encoder: [n, 6] -> [n, 4]; writes down what runs, and fails where it is told to."""

    def __init__(self, name: str = "", middle: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.events = name, list[str]()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, D)
        self.middle = nn.Tanh() if middle is None else middle
        self.fault, self.backward_fault = Fault(), Fault()
        self.again = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            self.events.append(f"{self.name} forward")
        x = x if mask is None else x * mask
        hidden = checkpoint(self._body, x, use_reentrant=False) if self.again else self._body(x)
        self.fault(len(x))
        return F.normalize(self.last(Fuse.apply(hidden, self.backward_fault)), dim=1)

    def _body(self, x: Tensor) -> Tensor:
        found: Tensor = self.middle(self.first(x))
        if found.requires_grad:
            found.register_hook(lambda _: self.events.append(f"{self.name} backward"))
        return found


def info_nce(found: dict[str, Tensor]) -> Tensor:
    """As a person writes it, for two or three embeddings and perhaps a scale."""
    found = dict(found)
    scale = found.pop("scale", torch.tensor(1.0))
    z, w, *others = found.values()
    scores, pairs = [scale * z @ other.T for other in (w, *others)], torch.arange(len(z))
    back = F.cross_entropy(scores[0].T, pairs)
    return (F.cross_entropy(torch.cat(scores, 1), pairs) + back) / 2


def contrastive() -> anybatch.Loss:
    return anybatch.contrastive(symmetric=True)


LOSSES: dict[str, Callable[[], Any]] = {"matrix": lambda: info_nce, "tiles": contrastive}
KINDS = (
    "two", "scale", "one of both", "three", "first frozen", "last frozen", "spectral",
    "spectral, one of both", "counts", "again", "masked",
)  # fmt: skip


class Counts(nn.Module):
    """Counts its calls in a buffer, which is more than one in a forward that calls it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh() * (1 + self.calls / 10)


def make(variant: str, middle: Callable[[], nn.Module] = nn.Tanh, seed: int = 1) -> Encoders:
    torch.manual_seed(seed)
    middle = Counts if variant == "counts" else middle
    a, b = Encoder("a", middle()), Encoder("b", middle())
    if "one of both" in variant or variant == "counts":
        b = a
    if "spectral" in variant:
        for encoder in dict.fromkeys((a, b)):
            spectral_norm(encoder.first)
    a.again = b.again = variant == "again"
    found: dict[str, nn.Module] = {"image": a, "text": b}
    if variant == "three":
        found["more"] = b
    model = Encoders(found, scale=3.0 if variant in ("scale", "three") else None).double()
    if "frozen" in variant:
        (a if "first" in variant else b).requires_grad_(requires_grad=False)
    return model


def batch(variant: str = "two", size: int = N) -> dict[str, Any]:
    torch.manual_seed(2)
    rows: dict[str, Any] = {name: torch.randn(size, WIDTH).double() for name in ("image", "text")}
    if variant == "three":
        rows["more"] = rows["text"].flip(1)
    if variant == "masked":
        rows["text"] = {"x": rows["text"], "mask": torch.rand(size, WIDTH) > 0.3}
        rows["image"] = (rows["image"],)
    return rows


def steps(loss: Any, rows: Any, **options: Any) -> Callable[[nn.Module], Tensor]:
    """Return two steps of one engine, a descent between them."""

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, **options)
        return descended(copied, lambda: engine.backward(rows))

    return run


def descended(model: nn.Module, step: Callable[[], Tensor]) -> Tensor:
    for _ in range(2):
        model.zero_grad()
        loss = step()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad if p.grad is not None else 0.0)
    return loss


def truth(variant: str, **options: Any) -> dict[str, Tensor]:
    def run(copied: nn.Module) -> Tensor:
        def step() -> Tensor:
            loss = info_nce(copied(**batch(variant)))
            loss.backward()
            return loss

        return descended(copied, step)

    return state_after(make(variant, **options), run)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SIDE", 8)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("micro_batch", [1, 8, 21])
@pytest.mark.parametrize("variant", KINDS)
def test_the_gradient_is_that_of_the_full_batch(variant: str, micro_batch: int, loss: str) -> None:
    run = steps(LOSSES[loss](), batch(variant), micro_batch=micro_batch)
    assert_exact(state_after(make(variant), run), truth(variant))


def test_a_graph_is_gone_before_the_next_one_is_made() -> None:
    model = make("two")
    events = list[str]()
    for encoder in model.encoders.values():
        encoder.events = events
    engine = Engine(model, contrastive(), micro_batch=9)
    engine.backward(batch())  # which finds out that samples meet in the loss
    events.clear()
    engine.backward(batch())
    of_a, of_b = ["a forward", "a backward"], ["b forward", "b backward"]
    assert events == [*of_b, *of_a * 3, *of_b * 2]  # the last of b was there already


@pytest.mark.large(few=1)
@pytest.mark.parametrize("loss", LOSSES)
def test_it_holds_one_graph_of_the_two_as_was_foreseen(loss: str) -> None:
    rows, most = {name: torch.randn(256, 8) for name in "ab"}, list[int]()
    for one_at_a_time in (True, False):
        layers = [nn.Linear(8, 64), *(nn.Tanh() for _ in range(16)), nn.Linear(64, 2)]
        parts = {name: nn.Sequential(*copy.deepcopy(layers)) for name in "ab"}
        one: nn.Module = Encoders(parts)
        if not one_at_a_time:
            one = anybatch.joint(lambda both, **options: both(**options), one)
        engine = Engine(one, LOSSES[loss](), micro_batch=64, memory="1GiB")
        engine.backward(rows)
        assert engine.last is not None
        assert engine.last.peak_bytes is not None
        assert engine.last.predicted_bytes is not None
        assert 0 <= engine.last.predicted_bytes - engine.last.peak_bytes <= 8  # a number
        most.append(engine.last.peak_bytes)
    graph = 16 * 64 * 64 * 4
    assert most[1] - most[0] == pytest.approx(graph, rel=0.1)


def test_a_loss_of_single_pairs_needs_one_pass() -> None:
    """Each pair by itself: its encoders meet in the loss, its samples do not."""

    def separate_pairs(found: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(found["image"], found["text"])

    model = make("scale")
    engine = Engine(model, separate_pairs, micro_batch=8)
    loss = engine.backward(batch())
    got = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_exact(got | {"loss": loss}, undivided(make("scale"), separate_pairs, batch(), None))
    assert engine.plan is not None
    assert engine.plan.mechanism == "streaming"


@pytest.mark.parametrize("variant", ["two", "one of both", "again"])
def test_dropout_is_that_of_one_encoder_after_the_other(variant: str) -> None:
    model, rows = make(variant, lambda: nn.Dropout(0.4)), batch(variant)
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    loss = Engine(model, contrastive(), micro_batch=8).backward(rows)
    got = {n: p.grad for n, p in model.named_parameters()} | {"loss": loss}
    got["dice"] = torch.get_rng_state().double()
    torch.manual_seed(5)
    found = {n: torch.cat([twin.encoders[n](x) for x in rows[n].split(8)]) for n in rows}
    loss = info_nce(found)
    loss.backward()
    want = {n: p.grad for n, p in twin.named_parameters()} | {"loss": loss.detach()}
    assert_exact(got, want | {"dice": torch.get_rng_state().double()})


class Begins(nn.Module):
    """Moves a buffer from some forward on, or in that one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Tensor
        self.register_buffer("moved", torch.ones((), dtype=torch.float64))
        self.on = self.once = False
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.on or (self.once and self.forwards == FORWARDS):
            self.moved += 1
        return x.tanh() * (float(self.moved) if self.on else 1.0)


FORWARDS = 4
"""Of an encoder of three micro-batches: the first forward of the second pass."""


@pytest.mark.parametrize("both", [False, True])
def test_a_buffer_that_begins_to_move_does_so_once(both: bool) -> None:
    """Encoders in laps count on it that none moves; where one does they run in turn again."""
    model, rows = make("two", Begins), batch()
    if both:
        model.encoders["text"] = model.encoders["image"]
    engine = Engine(model, contrastive(), micro_batch=8)
    engine.backward(rows)
    model.zero_grad()
    for encoder in model.encoders.values():
        encoder.middle.on = True
    twin = copy.deepcopy(model)
    got = {"loss": engine.backward(rows)} | {n: p.grad for n, p in model.named_parameters()}
    loss = info_nce(twin(**rows))
    loss.backward()
    want = {"loss": loss.detach()} | {n: p.grad for n, p in twin.named_parameters()}
    assert_exact(got | dict(model.named_buffers()), want | dict(twin.named_buffers()))


def test_a_buffer_that_moves_in_only_one_forward_is_refused() -> None:
    model, rows = make("two", Begins), batch()
    engine = Engine(model, contrastive(), micro_batch=8)
    engine.backward(rows)
    model.zero_grad()
    middle = model.encoders["image"].middle
    middle.once, middle.forwards = True, 0
    before = snapshot(model)
    with pytest.raises(NotExactError, match=r"must not depend on the samples .*image.middle.moved"):
        engine.backward(rows)
    assert same(before, snapshot(model))


def test_draws_of_the_full_batch_are_those_of_torch() -> None:
    def middle() -> nn.Module:
        return nn.Dropout(0.4)

    def seeded(run: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
        def first(copied: nn.Module) -> Tensor:
            torch.manual_seed(5)
            return run(copied)

        return first

    rows = batch()
    run = steps(contrastive(), rows, micro_batch=8, rng="batch")
    got = state_after(make("two", middle), seeded(run))

    def plain_step(copied: nn.Module) -> Tensor:
        def step() -> Tensor:
            loss = info_nce(copied(**rows))
            loss.backward()
            return loss

        return descended(copied, step)

    assert_exact(got, state_after(make("two", middle), seeded(plain_step)))


@pytest.mark.parametrize("variant", ["two", "one of both"])
def test_where_samples_meet_in_batchnorm_lanes_wait(variant: str) -> None:
    run = steps(contrastive(), batch(variant), micro_batch=8)
    got = state_after(make(variant, lambda: nn.BatchNorm1d(8)), run)
    assert_exact(got, truth(variant, middle=lambda: nn.BatchNorm1d(8)))


def test_local_statistics_are_those_of_encoders_one_by_one() -> None:
    found = []
    for one_at_a_time in (True, False):
        model = make("one of both", lambda: nn.BatchNorm1d(8))
        one: nn.Module = model
        rows: Any = batch()
        if not one_at_a_time:
            one = anybatch.joint(lambda both, a, b: both(image=a, text=b), model)
            rows = tuple(rows.values())
        engine = Engine(one, contrastive(), micro_batch=8, batchnorm="local")
        loss = engine.backward(rows)
        found.append({n: p.grad for n, p in model.named_parameters()} | {"loss": loss})
        found[-1] |= {n: b.double() for n, b in model.named_buffers()}
    assert_exact(*found)


WHEN = [
    (place, name, call) for place in ("forward", "backward") for name in "ab" for call in range(9)
]


@pytest.mark.large(few=3)
@pytest.mark.parametrize("memory", [None, "1MiB"], ids=["in place", "apart"])
@pytest.mark.parametrize("variant", ["scale", "one of both", "spectral", "counts", "last frozen"])
def test_memory_that_runs_out_anywhere_costs_no_gradient(
    variant: str, memory: str | None, some: Callable[..., list[Any]]
) -> None:
    want = undivided(make(variant), info_nce, batch(variant), None)
    failed, options, when = 0, dict[str, Any](micro_batch=8), some(WHEN, 3)
    if memory is not None:
        engine = Engine(make(variant), contrastive(), micro_batch=8, memory=memory)
        engine.backward(batch(variant))
        options = {"plan": engine.plan}
    for place, name, call in when:
        model = make(variant)
        encoder: Any = model.encoders["image" if name == "a" else "text"]
        engine = Engine(model, contrastive(), **options)
        fault = Fault(at(call))
        setattr(encoder, "fault" if place == "forward" else "backward_fault", fault)
        loss = engine.backward(batch(variant))
        failed += fault.failed
        got = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
        got |= {f"{n} (buffer)": b for n, b in model.named_buffers()} | {"loss": loss}
        assert_exact(got, want)
    assert failed > 10 * len(when) // len(WHEN)


def test_a_single_sample_that_does_not_fit_leaves_all_as_it_was() -> None:
    model = make("spectral")
    engine = Engine(model, contrastive(), micro_batch=8)
    engine.backward(batch())
    before = snapshot(model)
    encoder: Any = model.encoders["text"]
    encoder.backward_fault = Fault(above(0))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        engine.backward(batch())
    assert same(snapshot(model), before)


class Pairs(Dataset[dict[str, Tensor]]):
    """Rows of a batch, and what they are changed by."""

    def __init__(self, change: Callable[[], float] = float) -> None:
        self.rows, self.change = batch(), change

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return {name: t[index] + self.change() for name, t in self.rows.items()}, torch.zeros(())


def _without_targets(items: list[Any]) -> Any:
    return torch.utils.data.default_collate([inputs for inputs, _ in items]), None


def test_samples_that_are_loaded_on_the_way_are_loaded_once_a_pass() -> None:
    loads = []

    def load() -> float:
        loads.append(1)
        return 0.0

    rows = LazyBatch(Pairs(load), collate_fn=_without_targets)
    model = make("two")
    engine = Engine(model, contrastive(), micro_batch=8)
    engine.backward(rows)
    model.zero_grad()
    loads.clear()
    loss = engine.backward(rows)
    want = undivided(make("two"), info_nce, batch(), None)
    got = {f"{n}.grad": p.grad for n, p in model.named_parameters()} | {"loss": loss}
    assert_exact(got, want)
    assert len(loads) == 2 * 2 * N  # of two inputs


def test_samples_that_change_between_the_passes_are_refused() -> None:
    own = random.Random(0)
    engine = Engine(make("two"), contrastive(), micro_batch=8)
    with pytest.raises(NotReproducibleError, match="the second loaded other ones"):
        engine.backward(LazyBatch(Pairs(own.random), collate_fn=_without_targets))


@pytest.mark.parametrize("variant", ["scale", "one of both", "spectral"])
def test_saved_tensors_may_be_offloaded(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)
    model, want = make(variant), truth(variant)
    memory = Memory(1 << 30, "by hand", 1 << 30, (), 1, 1, "nobody")
    leaves = OffloadPlan("file", None, (0, 0), 0, 0, 1)
    plan = Plan(8, "two-pass", "in place", "", True, (), memory, offload=leaves)
    engine = Engine(model, contrastive(), plan=plan)
    loss = descended(model, lambda: engine.backward(batch(variant)))
    got = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    got |= {f"{n} (buffer)": b for n, b in model.named_buffers()} | {"loss": loss}
    assert_exact(got, want)
    assert engine.last is not None
    assert engine.last.moved_bytes > 0


def rows_of(rank: int) -> slice:
    return slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))


def on_rank(rank: int, _size: int, variant: str, loss: str, micro_batch: int) -> Any:
    own = {name: rows[rows_of(rank)] for name, rows in batch(variant).items()}
    return state_after(make(variant), steps(LOSSES[loss](), own, micro_batch=micro_batch))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(len(SIZES)) as found:
        yield found


@pytest.mark.large(few=3)
@pytest.mark.parametrize("micro_batch", [3, 22])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("variant", ["two", "scale", "one of both", "first frozen", "spectral"])
def test_negatives_are_those_of_all_ranks(
    pool: Pool, variant: str, loss: str, micro_batch: int
) -> None:
    want = truth(variant)
    for got in pool.run(on_rank, variant, loss, micro_batch):
        assert_exact(got, want)


def test_half_precision_sums_are_as_wide_as_those_of_encoders_one_by_one() -> None:
    rows = {name: rows.bfloat16() for name, rows in batch(size=512).items()}
    want = undivided(make("one of both"), info_nce, batch(size=512), None)
    model = make("one of both").bfloat16()
    Engine(model, contrastive(), micro_batch=2).backward(rows)
    for name, p in model.named_parameters():
        assert p.grad is not None
        error = (p.grad.double() - want[f"{name}.grad"]).norm() / want[f"{name}.grad"].norm()
        assert error < 0.1


def test_what_wants_all_outputs_at_once_gets_them() -> None:
    """A hook on the model, or a forward of a person's own."""
    observed = []

    class Own(Encoders):
        def forward(self, **inputs: Any) -> Any:
            found = super().forward(**inputs)
            observed.append(sorted(found))
            return found | {"image": found["image"] + found["text"].detach() * 0}

    hooked, own = make("two"), Own(dict(make("two").encoders.items()))
    hooked.register_forward_hook(lambda _m, _i, out: observed.append(sorted(out)))
    for model in (hooked, own):
        Engine(model, contrastive(), micro_batch=8).backward(batch())
        got = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
        want = undivided(make("two"), info_nce, batch(), None)
        assert_exact(got, {name: want[name] for name in got})
    assert observed
    assert all(names == ["image", "text"] for names in observed)


def test_one_encoder_may_be_called_by_itself_and_evaluate_says_the_loss() -> None:
    model, rows = make("scale"), batch()
    single = model(text=rows["text"])
    assert sorted(single) == ["scale", "text"]
    assert torch.equal(single["text"], model(**rows)["text"])
    assert single["scale"].item() == pytest.approx(3.0)
    found = Engine(model, contrastive(), micro_batch=5).evaluate(rows)
    assert_exact({"loss": found}, {"loss": info_nce(model(**rows)).detach()})


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="must name at least one module"):
        Encoders({})
    with pytest.raises(ValueError, match=r"scale must be above 0, and is -1"):
        Encoders({"a": nn.Identity()}, scale=-1.0)
    with pytest.raises(ValueError, match="scale must be a number, and it is a tensor"):
        Encoders({"a": nn.Identity()}, scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="give the encoder another one"):
        Encoders({"scale": nn.Identity()}, scale=1.0)
    model = make("two")
    with pytest.raises(BatchError, match=r"'image', 'text', and the inputs are 'imgae', 'text'"):
        model(imgae=torch.zeros(1, WIDTH), text=torch.zeros(1, WIDTH))
    with pytest.raises(BatchError, match="the inputs are nothing"):
        model()
    engine = Engine(model, contrastive(), micro_batch=8)
    rows = batch()
    with pytest.raises(BatchError, match="go by the names of the encoders"):
        engine.backward({"pixels": rows["image"], "text": rows["text"]})
    with pytest.raises(anybatch.errors.LossError, match="two or more embeddings"):
        engine.backward({"text": rows["text"]})


class Masked(nn.Linear):
    """Masks other classes in each call."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.masked_fill(torch.rand(out.shape, generator=OWN) < 0.3, -torch.inf)


OWN = torch.Generator()


def test_infinities_in_other_places_are_other_outputs() -> None:
    """What is finite in both passes is equal."""
    OWN.manual_seed(0)
    model, x = Masked(5, 4).double(), torch.randn(9, 5).double()
    engine = Engine(model, lambda out, _y: out.logsumexp((0, 1)), micro_batch=2)
    with pytest.raises(NotReproducibleError, match="both passes must give the same outputs"):
        engine.backward(x, torch.zeros(9))


def test_encoders_without_names_are_one_sentence_with_the_line_to_write() -> None:
    for unnamed in ((nn.Linear(2, 2), nn.Linear(2, 2)), ([nn.Linear(2, 2)],)):
        with pytest.raises(TypeError, match=r'Encoders\(\{"image": image, "text": text\}\)'):
            Encoders(*unnamed)
    Encoders(nn.ModuleDict({"image": nn.Linear(2, 2)}))
