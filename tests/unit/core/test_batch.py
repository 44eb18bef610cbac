from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.exactness.test_hanging import Held
from tests.oracle import assert_exact, state_after, undivided
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from anybatch import Engine, LazyBatch, Loss
from anybatch.core.batch import MicroBatch, TensorBatch, count_micro_batches, hanging, hangs
from anybatch.errors import BatchError, NotReproducibleError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(n: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, dtype=torch.float64), torch.randint(0, 3, (n,))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Draws from the three global generators."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(()) + random.random() + float(np.random.rand())
        return self.x[index] * noise, self.y[index]


def test_the_number_of_micro_batches_is_rounded_up() -> None:
    assert [count_micro_batches(10, n) for n in (1, 3, 4, 10, 11)] == [10, 4, 3, 1, 1]


def test_micro_batches_are_views_in_order() -> None:
    x, y = data()
    parts = list(TensorBatch.of(x, y).micro_batches(4))
    assert [part.size for part in parts] == [4, 4, 2]
    assert parts[1].inputs.data_ptr() == x[4:].data_ptr()
    assert torch.equal(torch.cat([part.targets for part in parts]), y)


def test_the_form_of_a_batch_is_that_of_its_tensors_and_found_once() -> None:
    x, y = torch.ones(4, 3, requires_grad=True), torch.ones(4).long()
    batch = TensorBatch.of({"x": x, "n": 3}, y)
    assert batch.form == (("[0]['x']", 2, torch.float32), ("[1]", 1, torch.int64))
    assert batch.form is batch.form
    assert batch.trained == (x,)


def test_a_fingerprint_changes_with_any_bit() -> None:
    x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.bfloat16)
    first = MicroBatch(x, y, 3).fingerprint()
    assert MicroBatch(x.clone(), y.clone(), 3).fingerprint() == first
    y[2] = 1e-30
    assert MicroBatch(x, y, 3).fingerprint() != first


@pytest.mark.parametrize("micro_batch", [1, 4, 5, 20])
@pytest.mark.parametrize("ignored", [(), (0,), (0, 1, 2, 3), (8, 9)])
def test_a_lazy_batch_is_exact_though_its_denominator_comes_last(
    micro_batch: int, ignored: tuple[int, ...]
) -> None:
    net, (x, y) = model(), data()
    y[list(ignored)] = -100
    lazy = LazyBatch(TensorDataset(x, y))
    for loss in (
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0]).double()),
        Loss.ratio(lambda o, t: F.cross_entropy(o, t, reduction="sum"), lambda t: (t >= 0).sum()),
        lambda o, t: F.cross_entropy(o, t) + F.mse_loss(o, torch.zeros_like(o)),
        lambda o, t: F.cross_entropy(o, t, reduction="sum") / len(o),
    ):
        fn = nn.CrossEntropyLoss() if isinstance(loss, Loss) else loss
        got = state_after(
            net, lambda m, f=loss: Engine(m, f, micro_batch=micro_batch).backward(lazy)
        )
        assert_exact(got, undivided(net, fn, x, y))


def test_a_lazy_batch_takes_the_requested_samples_in_that_order() -> None:
    x, y = data()
    order = [7, 7, 0, 3, 9]
    net = model()
    lazy = LazyBatch(TensorDataset(x, y), order)
    assert (len(lazy), lazy.size) == (5, 5)
    got = state_after(net, lambda m: Engine(m, F.cross_entropy, micro_batch=2).backward(lazy))
    assert_exact(got, undivided(net, F.cross_entropy, x[order], y[order]))


def test_a_loss_inside_the_model_takes_items_as_inputs() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    x, y = data()
    y[:4] = -100

    class Items(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": x[index], "labels": y[index]}

    net = Inside()
    loss = Loss.inside(count=lambda inputs, _: (inputs["labels"] != -100).sum())
    want = undivided(net, lambda out: out["loss"], {"x": x, "labels": y}, None)
    for inputs in (LazyBatch(Items()), {"x": x, "labels": y}):
        got = state_after(net, lambda m, i=inputs: Engine(m, loss, micro_batch=4).backward(i))
        assert_exact(got, want)


@pytest.mark.parametrize("workers", [0, 1])
def test_two_passes_over_augmented_samples_meet_the_same_ones(workers: int) -> None:
    net, (x, y) = model(), data()
    lazy = LazyBatch(Augmented(x, y), workers=workers)
    observed: list[Tensor] = []

    class Record(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: Tensor) -> Tensor:
            observed.append(inputs.clone())
            return self.net(inputs)

    def coupled(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out - out.mean(0), target)

    engine = Engine(Record(), coupled, micro_batch=4)
    loss = engine.backward(lazy)
    full = torch.cat(observed[-5:-2])
    assert len(full) == 10
    assert torch.equal(torch.cat(observed[-2:]), full[:8])
    assert torch.allclose(loss, coupled(net(full), y).detach(), rtol=0, atol=1e-13)


def test_samples_that_change_between_the_passes_are_refused() -> None:
    x, y = data()

    class Drifting(Augmented):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.x = self.x + 1
            return self.x[index], self.y[index]

    engine = Engine(model(), lambda o, t: F.cross_entropy(o - o.mean(0), t), micro_batch=4)
    with pytest.raises(NotReproducibleError, match="second loaded other ones.*one pass"):
        engine.backward(LazyBatch(Drifting(x, y)))


def test_a_lazy_batch_is_in_memory_one_micro_batch_at_a_time() -> None:

    class Huge(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.full((2**20,), float(index % 3)), torch.tensor(index % 3)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, FakeTensor):
                live.append(x.untyped_storage().nbytes())
            return self.net(x[:, :1])

    live: list[int] = []
    Engine(First(), F.cross_entropy, micro_batch=4).backward(LazyBatch(Huge()))
    assert max(live) == 4 * 2**20 * 4, "one micro-batch at a time"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LazyBatch(TensorDataset(torch.zeros(3)), []), "indices is empty"),
        (lambda: LazyBatch(Endless()), "Endless has no length: pass indices"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        make()


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(())


def test_items_that_are_no_pairs_are_refused() -> None:
    lazy = LazyBatch(TensorDataset(torch.zeros(3, 5)))
    with pytest.raises(BatchError, match=r"must be a pair \(input, target\)"):
        Engine(model(), F.cross_entropy, micro_batch=2).backward(lazy)


def test_a_collate_that_drops_samples_is_refused() -> None:
    x, y = data()

    def drop(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        retained = items[:1]
        return torch.stack([a for a, _ in retained]), torch.stack([b for _, b in retained])

    lazy = LazyBatch(TensorDataset(x, y), collate_fn=drop)
    with pytest.raises(BatchError, match="it made 1 rows of 4 items"):
        Engine(model(), F.cross_entropy, micro_batch=4).backward(lazy)


@pytest.mark.parametrize("workers", [0, 1])
def test_every_step_draws_augmentations_of_its_own(workers: int) -> None:
    """The seed of the workers was drawn once an object: every epoch saw the same samples."""
    x, y = data()
    lazy = LazyBatch(Augmented(x, y), workers=workers)

    def epoch() -> Tensor:
        return torch.cat([micro.inputs for micro in lazy.micro_batches(4)])

    rng_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    first, second = epoch(), epoch()
    assert not torch.equal(first, second)
    torch.set_rng_state(rng_state[0])
    random.setstate(rng_state[1])
    np.random.set_state(rng_state[2])
    assert torch.equal(epoch(), first), "the same dice give the same samples"


@pytest.mark.parametrize("wrap", [int, float, torch.tensor, np.array])
def test_a_number_that_depends_on_the_samples_is_refused(wrap: Any) -> None:
    """A token count from collate_fn divided each micro-batch by its own, or all by the first's."""
    x, y = data(8)

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, dict[str, Any]]:
        targets = torch.stack([b for _, b in items])
        inputs = torch.stack([a for a, _ in items])
        return inputs, {"y": targets, "n_tokens": wrap(len(items)), "k": 3, "t": torch.tensor(1.0)}

    lazy = LazyBatch(TensorDataset(x, y), collate_fn=collate)
    loss = Loss.per_sample(lambda o, t: F.cross_entropy(o, t["y"], reduction="none"))
    with pytest.raises(BatchError, match=r"target\['n_tokens'\] is .*3.* in one .*2.* in another"):
        Engine(model(), loss, micro_batch=3).backward(lazy)
    Engine(model(), loss, micro_batch=4).backward(lazy)


def test_captions_and_arrays_go_with_their_samples() -> None:
    """A list of N strings was given whole to every micro-batch, and zip cut it in silence."""
    x, y = data()

    class Captioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Tensor, names: list[str], scale: Any) -> Tensor:
            lengths = torch.tensor([float(len(name)) for name in names], dtype=x.dtype)
            return self.net(x) * lengths[:, None] * torch.as_tensor(scale)[:, None]

    net = Captioned()
    inputs = (x, ["a" * (i + 1) for i in range(10)], np.linspace(1.0, 2.0, 10))
    got = state_after(net, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(inputs, y))
    assert_exact(got, undivided(net, F.cross_entropy, inputs, y))


def test_a_fingerprint_sees_arrays_and_captions() -> None:
    x = torch.zeros(2)

    def print_of(*more: Any) -> int:
        return MicroBatch([x, *more], None, 2).fingerprint()

    assert print_of(np.zeros(2)) != print_of(np.ones(2))
    assert print_of(["a", "b"]) != print_of(["a", "c"])
    assert print_of(np.array([object()])) == print_of(np.array([object()]))
    assert print_of(torch.tensor([1j]).conj()) != print_of(torch.tensor([1j]))


def test_rows_that_keep_attributes_are_no_doubt() -> None:
    rows = data()[0].as_subclass(Held)
    rows.path = "a"  # type: ignore[attr-defined]
    assert hangs(rows)
    assert hanging(rows, "inputs") == set()
    assert hanging({"x": rows}, "outputs", classes=True) == {("outputs['x']", "the class Held")}
    assert not hangs({"x": data()[0], "n": 3})
