"""What a subclass of a Trainer overrides is called as transformers would, or refused by its name.

The truth is the same class over transformers' own Trainer, with the undivided batch.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor, nn

from anybatch.errors import NotExactError, NotYetError

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from tests.integrations.trainings import QUIET  # noqa: E402
from tests.integrations.words import Words, made, rows, stacked  # noqa: E402

from anybatch.integrations.transformers import Trainer  # noqa: E402
from anybatch.integrations.transformers_refused import SKIPPED  # noqa: E402

Theirs = transformers.Trainer
ORDERS = ["before", "behind", "below"]
"""A class of transformers' own Trainer before ours, behind it, or written for ours."""


def joined(trainer_class: Any, order: str) -> Any:
    """Return a class that is `trainer_class` and ours, which is called as `trainer_class` is."""
    if order == "below":
        return type(
            trainer_class.__name__,
            (Trainer,),
            dict(vars(trainer_class)) | {"__wrapped__": trainer_class},
        )
    return type(
        "Both", (trainer_class, Trainer) if order == "before" else (Trainer, trainer_class), {}
    )


def trainer_of(trainer_class: Any, folder: Path, model: nn.Module | None = None, **how: Any) -> Any:
    args = transformers.TrainingArguments(
        str(folder),
        **QUIET
        | {
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "train_sampling_strategy": "sequential",
            "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 16,
            "max_steps": 3,
        },
    )
    return trainer_class(model or made(), args, train_dataset=rows(), eval_dataset=rows(), **how)


class Prepares(Theirs):
    def _prepare_inputs(self, inputs: Any) -> Any:
        found = Theirs._prepare_inputs(self, inputs)
        return {**found, "x": found["x"] * 2}


class PreparesItself(Theirs):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return {"x": inputs["x"].flip(1), "labels": inputs["labels"]}


class PreparesEach(Theirs):
    def _prepare_input(self, data: Any) -> Any:
        found = Theirs._prepare_input(self, data)
        return found * 2 if isinstance(found, Tensor) and found.is_floating_point() else found


@contextmanager
def doubled() -> Iterator[None]:
    Words.scale = 2.0
    try:
        yield
    finally:
        Words.scale = 1.0


class Surrounds(Theirs):
    def compute_loss_context_manager(self) -> Any:
        stack = ExitStack()
        stack.enter_context(doubled())
        return stack


class Casts(Theirs):
    def autocast_smart_context_manager(self, *_arguments: Any) -> Any:
        return doubled()


class Optimizes(Theirs):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer


class Loads(Theirs):
    def get_train_dataloader(self) -> Any:
        every = rows()
        return [stacked(every[i : i + 11]) for i in (0, 11, 22)]


class Clips(Theirs):
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


CALLED = [Prepares, PreparesItself, PreparesEach, Surrounds, Casts, Optimizes, Loads, Clips]


@pytest.mark.product
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("trainer_class", CALLED, ids=lambda trainer_class: trainer_class.__name__)
def test_what_is_overridden_is_called(tmp_path: Path, trainer_class: Any, order: str) -> None:
    one, other = (
        trainer_of(trainer_class, tmp_path),
        trainer_of(joined(trainer_class, order), tmp_path),
    )
    other._requested["micro_batch"] = 3
    plain = trainer_of(Theirs, tmp_path)
    for trainer in (one, other, plain):
        trainer.train()
    assert other.engine.last.micro_batch == 3
    assert_exact(other.model.state_dict(), one.model.state_dict())
    assert not torch.equal(plain.model.inner.weight, one.model.inner.weight)  # it does something


@pytest.mark.product
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "trainer_class", CALLED[:5], ids=lambda trainer_class: trainer_class.__name__
)
def test_an_evaluation_in_parts_calls_it_too(
    tmp_path: Path, trainer_class: Any, order: str
) -> None:
    one = trainer_of(trainer_class, tmp_path).predict(rows())
    trainer = trainer_of(joined(trainer_class, order), tmp_path, micro_batch=3)
    other = trainer.predict(rows())
    assert trainer._evaluates.engine.last.micro_batch == 3
    got, want = (
        {"loss": torch.tensor(found.metrics["test_loss"]), "out": torch.tensor(found.predictions)}
        for found in (other, one)
    )
    assert_exact(got, want, {"loss": float(np.finfo(np.float32).eps)})  # it is a float32


class Steps(Theirs):
    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        inputs = {**inputs, "x": inputs["x"] * 2}
        return super(self.above, self).training_step(model, inputs, *rest)


def test_a_step_that_calls_ours_is_called(tmp_path: Path) -> None:
    Steps.above = Steps
    one, other = trainer_of(Steps, tmp_path), trainer_of(joined(Steps, "before"), tmp_path)
    for trainer in (one, other):
        trainer.train()
    assert other.engine.last.samples == 1
    assert_exact(other.model.state_dict(), one.model.state_dict())


class Losing(Theirs):
    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        return model(**inputs)["loss"]


class InParallel(Theirs):
    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return Theirs._prepare_context_parallel_inputs(self, model, inputs)


class Stepping(Theirs):
    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        return Theirs.training_step(self, model, inputs, *rest)


WRONG = [
    (
        Losing,
        "before",
        r"Losing overrides compute_loss: leave it out of the class, and pass compute_loss_func=",
    ),
    (
        Losing,
        "behind",
        r"Losing overrides compute_loss: leave it out of the class, and pass compute_loss_func=",
    ),
    (
        Losing,
        "below",
        r"Losing overrides compute_loss: leave it out of the class, and pass compute_loss_func=",
    ),
    (InParallel, "before", r"InParallel overrides _prepare_context_parallel_inputs: override"),
    (InParallel, "behind", r"InParallel overrides _prepare_context_parallel_inputs: override"),
    (Stepping, "behind", r"Stepping overrides training_step: .*class Both\(Stepping, Trainer\)"),
    (Stepping, "before", r"Both.training_step did not: let it call super\(\).training_step"),
    (Stepping, "below", r"Stepping.training_step did not: let it call super\(\).training_step"),
]


@pytest.mark.product
@pytest.mark.parametrize(("trainer_class", "order", "match"), WRONG)
def test_what_would_not_be_called_is_refused(
    tmp_path: Path, trainer_class: Any, order: str, match: str
) -> None:
    model = made()
    with pytest.raises(NotExactError, match=match):
        trainer_of(joined(trainer_class, order), tmp_path, model, micro_batch=3).train()
    assert_exact(model.state_dict(), made().state_dict())


def own_loss(trainer: Any) -> None:
    trainer.compute_loss = lambda model, inputs, *rest, **named: model(**inputs)["loss"]


def own_backward(trainer: Any) -> None:
    trainer.accelerator.backward = lambda loss, **named: (2 * loss).backward()


PUT = [
    (
        own_loss,
        r"the object overrides compute_loss: leave it out of the class, and pass",
    ),
    (own_backward, r"Accelerator.backward is not accelerate's own: override training_step"),
]


@pytest.mark.parametrize(("put", "match"), PUT, ids=["compute_loss", "backward"])
def test_what_is_put_into_an_object_is_refused(tmp_path: Path, put: Any, match: str) -> None:
    trainer = trainer_of(Trainer, tmp_path)
    put(trainer)
    with pytest.raises(NotExactError, match=match):
        trainer.train()
    trainer = trainer_of(Trainer, tmp_path)
    trainer.add_callback(During(lambda: put(trainer)))
    with pytest.raises(NotExactError, match=match):
        trainer.train()
    assert trainer.state.global_step == 1


class During(transformers.TrainerCallback):
    """Does something after the first step."""

    def __init__(self, do: Any) -> None:
        self._do = do

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 1:
            self._do()


@pytest.mark.parametrize("name", ["compute_loss", "training_step"])
def test_what_is_put_into_transformers_own_class_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Theirs, name, lambda *arguments, **named: None)
    with pytest.raises(NotExactError, match=rf"what was put into .*Trainer overrides {name}"):
        trainer_of(Trainer, tmp_path)


def squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs["logits"].square().sum() / num_items_in_batch


def test_a_loss_that_is_passed_later_counts_from_then_on(tmp_path: Path) -> None:
    found = []
    for trainer_class in (Theirs, Trainer):
        trainer = trainer_of(trainer_class, tmp_path)

        def put(trainer: Any = trainer) -> None:
            trainer.compute_loss_func = squares

        trainer.add_callback(During(put))
        trainer.train()
        found.append(trainer.model.state_dict())
    assert_exact(found[1], found[0])


class Counted(Words):
    """Divides by what it is told, as transformers' own models do."""

    def forward(self, x: Tensor, labels: Tensor, **named: Any) -> Any:
        found = super().forward(x, labels)
        count = named.get("num_items_in_batch")
        factor = 1 if count is None else labels.ge(0).sum() / count
        return {**found, "loss": found["loss"] * factor}


def counts(times: int) -> Any:
    class Counts(Theirs):
        def _get_num_items_in_batch(self, batches: Any, device: Any) -> Any:
            return times * Theirs._get_num_items_in_batch(self, batches, device)

    return Counts


@pytest.mark.parametrize("order", ORDERS)
def test_items_that_are_counted_otherwise_are_refused(tmp_path: Path, order: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Counted().double()

    one, other = (trainer_of(k, tmp_path, model()) for k in (counts(1), joined(counts(1), order)))
    for trainer in (one, other):
        trainer.train()
    assert_exact(other.model.state_dict(), one.model.state_dict())
    trainer = trainer_of(joined(counts(2), order), tmp_path, model())
    with pytest.raises(NotExactError, match="is 80 in Counts and 40 in transformers.Trainer: do n"):
        trainer.train()


@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_an_optimizer_that_updates_in_backward_is_refused(tmp_path: Path, name: str) -> None:
    args = transformers.TrainingArguments(str(tmp_path), optim=name, use_cpu=True)
    with pytest.raises(NotYetError, match="updates inside backward: take another optimizer"):
        Trainer(made(), args)


OF_A_STEP = {"prediction_step", "get_batch_samples", "_get_num_items_in_batch"}
"""What makes an evaluation in one piece where it is overridden."""


def counting(besides: set[str]) -> Any:
    """Return a class that overrides every method but those that are refused, and counts calls."""

    def counted(name: str) -> Any:
        own = getattr(Theirs, name)

        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            vars(self).setdefault("counter", Counter())[name] += 1
            return own(self, *arguments, **named)

        vars(method)["__signature__"] = inspect.signature(own)
        return method

    names = {name for name, one in vars(Theirs).items() if inspect.isfunction(one)}
    names -= {"__init__", *SKIPPED, *besides}
    return type("Counting", (Theirs,), {name: counted(name) for name in names})


@pytest.mark.product
@pytest.mark.parametrize("besides", [set(), OF_A_STEP], ids=["in one piece", "in parts"])
@pytest.mark.parametrize("order", ["before", "behind"])
def test_every_other_method_is_called_as_often_as_by_transformers(
    tmp_path: Path, order: str, besides: set[str]
) -> None:
    """Whatever a class overrides in training, evaluation and prediction."""
    trainer_class, found = counting(besides), []
    for one, how in ((trainer_class, {}), (joined(trainer_class, order), {"micro_batch": 3})):
        trainer = trainer_of(one, tmp_path, **how)
        trainer.train()
        trainer.evaluate()
        trainer.predict(rows())
        found.append(dict(trainer.counter))
    assert len(found[0]) > 40
    assert found[1] == found[0]
    assert (trainer._evaluates is not None) == bool(besides)
