"""`anybatch.chunked_losses`: loss and gradients of whole logits, whatever is done to them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Engine, chunked_losses
from anybatch.errors import LossError

N, L, D, V = 3, 7, 6, 50
WEIGHT = torch.linspace(0.1, 2, V).double()
SOFT = torch.linspace(0, 9, N * L * V).sin().square().view(N, L, V).double()
MASK = torch.arange(N * L).view(N, L) % 3 > 0

Use = Callable[[Tensor, Tensor], Tensor]


def flat(z: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), **options)


def log_probabilities(z: Tensor, y: Tensor) -> Tensor:
    """As TRL selects them, sample by sample."""
    each = [a.gather(-1, b[:, None])[:, 0] - a.logsumexp(-1) for a, b in zip(z, y, strict=True)]
    return -torch.stack(each).mean()


CHUNKED: dict[str, Use] = {
    "mean": flat,
    "sum": lambda z, y: flat(z, y, reduction="sum"),
    "a mask": lambda z, y: (flat(z, y, reduction="none").view(N, L) * MASK).sum() / MASK.sum(),
    "ignored": lambda z, y: flat(z, torch.where(MASK, y, -100)),
    "all ignored but one": lambda z, y: flat(
        z, torch.where(torch.arange(L) > 0, -100, y)[:1].expand(N, L)
    ),
    "weighted": lambda z, y: flat(z, y, ignore_index=3, weight=WEIGHT),
    "smooth": lambda z, y: flat(z, y, label_smoothing=0.1),
    "smooth, weighted": lambda z, y: flat(z, y, label_smoothing=0.1, weight=WEIGHT, ignore_index=2),
    "soft targets": lambda z, _: F.cross_entropy(
        z.reshape(-1, V), SOFT.reshape(-1, V), weight=WEIGHT
    ),
    "soft targets of tokens": lambda z, _: F.cross_entropy(z.transpose(1, 2), SOFT.mT),
    "columns second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "columns second, permuted": lambda z, y: F.cross_entropy(
        z.permute(0, 2, 1).contiguous(), y, ignore_index=1, weight=WEIGHT
    ),
    "columns second by mT": lambda z, y: F.cross_entropy(z.mT, y, label_smoothing=0.2),
    "shifted": lambda z, y: flat(z[:, :-1], y[:, 1:]),
    "shifted by dots": lambda z, y: flat(z[..., :-1, :].contiguous(), y[..., 1:]),
    "scaled": lambda z, y: flat(0.3 * z / 2, y),
    "a cap": lambda z, y: flat(torch.tanh(z / 3) * 3, y),
    "a cast": lambda z, y: flat(z.to(torch.float64), y),
    "half precision between": lambda z, y: flat(z.to(torch.float32).double(), y),
    "a tensor of one number": lambda z, y: flat(z * torch.tensor(0.5).double(), y),
    "a tensor of each column": lambda z, y: flat(z + WEIGHT.view(1, 1, V), y),
    "log-probabilities": lambda z, y: -z.log_softmax(-1).gather(-1, y[..., None])[MASK].mean(),
    "log-probabilities of samples": log_probabilities,
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, 2).view(-1, V), y.view(-1), weight=WEIGHT),
    "selected rows": lambda z, y: F.cross_entropy(z[MASK], y[MASK]),
    "the last token": lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "flattened": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "tokens first": lambda z, y: F.cross_entropy(
        z.transpose(0, 1).reshape(-1, V), y.t().reshape(-1)
    ),
    "a z-loss": lambda z, y: flat(z, y) + 0.01 * z.logsumexp(-1).square().mean(),
    "without a gradient": lambda z, y: (
        z.detach().softmax(-1).gather(-1, y[..., None])[..., 0]
        * flat(z, y, reduction="none").view(N, L)
    ).mean(),
    "weights of the logits' type": lambda z, y: (
        flat(z, y, weight=WEIGHT.float().to(z)) * z.new_ones(1).type_as(z)[0]
    ),
    "sums of columns": lambda z, y: flat(z, y) + z.sum(-1, keepdim=True).square().mean(),
}

WHOLE: dict[str, Use] = {
    "a new tensor of themselves": lambda z, y: (
        flat(z, y) * (1 + z.new_tensor(z.detach()).square().mean())
    ),
    "entropy": lambda z, _: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "topk": lambda z, y: z.topk(3, -1)[0].mean() + flat(z, y),
    "a mean over rows": lambda z, _: z.mean(1).square().mean(),
    "softmax over rows": lambda z, y: flat(z.softmax(1), y),
    "a product": lambda z, _: (z @ WEIGHT).square().mean(),
    "a comparison": lambda z, y: flat(torch.where(z > 0, z, -z), y),
    "columns become rows": lambda z, _: z.reshape(-1, 5).square().sum(0).prod() * 1e-9,
    "some columns": lambda z, y: flat(z[..., : V // 2], y % (V // 2)),
    "an index of columns": lambda z, y: flat(z[..., torch.arange(V).flip(0)], y),
    "a number that trains": lambda z, y: flat(z * z[0, 0, 0].exp(), y),
    "written": lambda z, y: flat(written(z * 1.0), y),
    "divided in place": lambda z, y: flat(z.div_(2), y),
    "a mask of columns": lambda z, y: flat(z.masked_fill(WEIGHT > 1.9, -3.0), y),
}


def written(z: Tensor) -> Tensor:
    z[..., 5:9] = -3.0
    return z


def metrics_first(z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        right = (z.argmax(-1) == y).double().mean()
        right = right + z.topk(2, -1)[0].mean() * 0
    return flat(z, y) * (1 + right)


CHUNKED["metrics before the loss"] = metrics_first


class Net(nn.Module):
    """A body, and a head in several forms."""

    def __init__(self, head: str = "plain") -> None:
        super().__init__()
        self.form = head
        self.embedding, self.body = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=head in ("plain", "adapted"))
        if head == "tied":
            self.head.weight = self.embedding.weight
        if head == "frozen":
            self.head.requires_grad_(requires_grad=False)
        if head == "adapted":
            self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(self.embedding(x)))
        if self.form == "a product":
            return h @ self.head.weight.t()
        z: Tensor = self.head(h)
        return z + self.up(self.down(h)) * 0.5 if self.form == "adapted" else z


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randint(V, (N, L)), torch.randint(V, (N, L))


def compared(net: nn.Module, use: Use, rows: int | None = 4) -> Any:
    """Compare loss and gradients of whole logits and of chunks; return the report."""
    x, y = batch()
    other = copy.deepcopy(net)
    loss = use(net(x), y)
    loss.backward()
    with chunked_losses(rows) as report:
        found = use(other(x), y)
        found.backward()
    assert type(found) is Tensor
    assert_exact(state_of(other, found), state_of(net, loss))
    return report


@pytest.mark.parametrize("rows", [1, 4, 21, 1000, None])
@pytest.mark.parametrize("name", CHUNKED)
def test_losses_in_chunks_are_those_of_whole_logits(name: str, rows: int | None) -> None:
    report = compared(Net().double(), CHUNKED[name], rows)
    assert report.chunked
    assert set(report.materialised) <= {"topk"}


@pytest.mark.parametrize("head", ["tied", "frozen", "adapted", "a product"])
@pytest.mark.parametrize("name", CHUNKED)
def test_a_head_may_have_any_form(name: str, head: str) -> None:
    assert compared(Net(head).double(), CHUNKED[name]).chunked


@pytest.mark.parametrize("head", ["plain", "tied", "adapted"])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_other_functions_get_the_whole_logits_and_the_report_says_so(name: str, head: str) -> None:
    report = compared(Net(head).double(), WHOLE[name])
    assert report.materialised
    assert "materialised: none" not in str(report)


def through_a_view(z: Tensor) -> Tensor:
    view = z.view(-1, V)
    view[..., 3] = -2.0
    return z


def before_a_view(z: Tensor) -> Tensor:
    view = z.view(-1, V)
    z[..., 3] = -2.0
    return view


def by_data(z: Tensor) -> Tensor:
    view = z.view(-1, V)
    z.data[..., 3] = -2.0
    return view


def unfolded(z: Tensor) -> Tensor:
    view = z.view(-1, V)
    z.unfold(-1, 5, 5).mul_(2)
    return view


def through_no_copy(z: Tensor) -> Tensor:
    z.double().mul_(2)
    return z


def through_a_copy(z: Tensor) -> Tensor:
    z.clone().mul_(2)
    z.transpose(0, 1).contiguous().mul_(2)
    return z


def of_detached(z: Tensor) -> Tensor:
    with torch.no_grad():
        z.detach().mul_(2)
    return z


def rectified(z: Tensor) -> Tensor:
    nn.ReLU(inplace=True)(z)
    return z


def rectified_by_place(z: Tensor) -> Tensor:
    view = z.view(-1, V)
    F.relu(z, True)
    return view


def clamped(z: Tensor) -> Tensor:
    z.clamp_(max=0.1)
    return torch.zeros(V).double() + z


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "through a view": through_a_view,
    "before a view is used": before_a_view,
    "by data": by_data,
    "to windows": unfolded,
    "to a cast that is none": through_no_copy,
    "to copies": through_a_copy,
    "to a detached view": of_detached,
    "by a module": rectified,
    "by a function, by place": rectified_by_place,
    "before a sum": clamped,
    "and is itself": lambda z: z if z.div_(2) is z else z * 0,
}


@pytest.mark.parametrize("head", ["plain", "adapted"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_logits_is_seen_wherever_torch_shows_it(name: str, head: str) -> None:
    compared(Net(head).double(), lambda z, y: flat(WRITES[name](z), y))


def reverse_sum(z: Tensor, y: Tensor) -> Tensor:
    return flat(torch.add(WEIGHT, z, alpha=3.0), y) + flat(WEIGHT.add(z, alpha=2), y)


def metrics_in_inference_mode(z: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        z.topk(2)
    return flat(z, y)


def added_without_gradient(z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        total = z + z * 2
        same = z.double()
    return flat(same, y) + flat(total, y)


def checkpointed(z: Tensor, y: Tensor) -> Tensor:
    of = checkpoint(F.gelu, z, use_reentrant=False)
    assert isinstance(of, Tensor)
    return flat(z, y) + of.square().mean()


ODD: dict[str, Use] = {
    "a sum with a factor, the other way round": reverse_sum,
    "a metric in inference mode": metrics_in_inference_mode,
    "a sum without a gradient": added_without_gradient,
    "a checkpoint of logits": checkpointed,
    "a sum with a plain tensor first": lambda z, y: flat(WEIGHT + z, y),
    "one number with a dimension": lambda z, y: flat(z * torch.tensor([1.3]).double(), y),
    "another precision": lambda z, y: flat(z.float() * torch.tensor([1.3]).double(), y),
    "the same bits": lambda z, y: flat(z, y) + z.detach().view(torch.int64).double().mean() * 1e-19,
    "keepdims": lambda z, y: flat(z - z.mean(-1, keepdims=True), y),  # type: ignore[call-overload]
    "a mask of numpy": lambda z, y: F.cross_entropy(z[MASK.numpy()], y[MASK]),
    "a mask of numpy over all": lambda z, _: (
        z[(WEIGHT > 1).expand(N, L, V).numpy()].square().mean()
    ),
    "no columns": lambda z, y: flat(z, y) + z.gather(-1, y[..., None][..., :0]).sum(),
    "a tiny number": lambda z, y: flat(z / 1e-310 * 1e-310, y),
    "whole numbers": lambda z, y: flat(z, y) + z.mul(10).to(torch.int64).double().sum(-1).mean(),
    "the name of the type": lambda z, y: flat(z, y) * len(str(z.type())),
    "large and small numbers": lambda z, y: flat(z * 1e30 / 1e30, y),
    "a loss of log-probabilities of columns second": lambda z, y: F.nll_loss(
        z.log_softmax(-1).mT, y, weight=WEIGHT
    ),
    "two stages": lambda z, y: two_stages(z, y),
    "a gradient of logits": lambda z, y: gradient_of(z, y),
}


def two_stages(z: Tensor, y: Tensor) -> Tensor:
    leaf = z.detach().requires_grad_()
    flat(leaf, y).backward()
    assert leaf.grad is not None
    return (z * leaf.grad).sum()


def gradient_of(z: Tensor, y: Tensor) -> Tensor:
    z.retain_grad()
    loss = flat(z, y)
    loss.backward(retain_graph=True)
    assert z.grad is not None
    return loss + z.grad.square().sum()


@pytest.mark.parametrize("head", ["plain", "adapted", "a product"])
@pytest.mark.parametrize("name", ODD)
def test_odd_functions_of_logits_are_as_torch_has_them(name: str, head: str) -> None:
    compared(Net(head).double(), ODD[name])


@pytest.mark.parametrize("ask", ["grad", "hook", "retain", "inputs"])
def test_a_gradient_of_logits_after_their_loss_is_refused(ask: str) -> None:
    x, y = batch()
    with chunked_losses():
        z = Net().double()(x)
        loss = flat(z.float(), y)
        with pytest.raises(LossError, match="must come before their loss"):
            if ask == "grad":
                torch.autograd.grad(loss, z)
            elif ask == "hook":
                z.register_hook(lambda dz: dz)
            elif ask == "retain":
                z.retain_grad()
            else:
                loss.backward(inputs=[z])


@pytest.mark.parametrize("use", [flat, WHOLE["topk"]])
def test_second_derivatives_are_refused_or_right(use: Use) -> None:
    x, y = batch()
    net = Net().double()
    with chunked_losses():
        loss = use(net(x), y)
        with (
            pytest.raises(LossError, match="no second derivatives")
            if use is flat
            else (torch.enable_grad())
        ):
            torch.autograd.grad(loss, net.head.weight, create_graph=True)


def test_requires_grad_counts_as_it_was_when_the_map_was_called() -> None:
    x, y = batch()
    net = Net().double()
    with chunked_losses(4):
        net.head.requires_grad_(requires_grad=False)
        z = net(x)
        net.head.requires_grad_()
        flat(z, y).backward()
    assert net.head.weight.grad is None
    assert net.body.weight.grad is not None


def test_an_input_that_was_written_to_before_the_map_is_no_obstacle() -> None:
    class Rectified(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu_(self.body(self.embedding(x)))
            z: Tensor = self.head(h)
            return z

    compared(Rectified().double(), lambda z, y: F.cross_entropy(z[MASK], y[MASK]))
    compared(Rectified().double(), CHUNKED["tokens first"])


@pytest.mark.parametrize("loss_under", [True, False])
@pytest.mark.parametrize("map_under", [True, False])
def test_autocast_of_a_map_is_that_of_its_call(map_under: bool, loss_under: bool) -> None:
    x, y = batch()
    found = []
    for rows in (None, 4):
        torch.manual_seed(1)
        net = Net()
        with chunked_losses(rows) if rows else torch.enable_grad():
            h = torch.tanh(net.body(net.embedding(x)))
            with torch.autocast("cpu", torch.bfloat16, enabled=map_under):
                z = net.head(h)
            with torch.autocast("cpu", torch.bfloat16, enabled=loss_under):
                loss = flat(z, y)
                top = z.topk(2)[0]
            loss.backward()
        found.append((loss.detach(), top.detach(), net.head.weight.grad))
    for mine, its in zip(*found, strict=True):
        assert mine is not None
        assert its is not None
        assert mine.dtype == its.dtype
        close = {"rtol": 0.02, "atol": 1e-3} if map_under else {}
        torch.testing.assert_close(mine, its, **close)  # type: ignore[arg-type]


def test_backward_under_autocast_and_sums_of_two_precisions_are_computed() -> None:
    x, y = batch()
    net = Net()
    up = nn.Linear(D, V, dtype=torch.bfloat16)
    with chunked_losses(4), torch.autocast("cpu", torch.bfloat16):
        h = torch.tanh(net.body(net.embedding(x)))
        with torch.autocast("cpu", enabled=False):
            loss = flat(net.head(h.float()) + up(h.bfloat16()), y) + flat(net.head(h.float()), y)
        loss.backward()
    assert up.weight.grad is not None


def test_transforms_and_tensors_without_memory_get_torch_s_own_map() -> None:
    net = Net().double()
    h = torch.randn(2, D).double()
    with chunked_losses(4) as report:
        torch.func.jacrev(lambda h: net.head(h).logsumexp(-1))(h)
        torch.func.vmap(lambda h: net.head(h[None]).logsumexp(-1))(h)
        assert type(nn.Linear(D, V, device="meta")(h.float().to("meta"))) is Tensor
    assert not report.chunked


@pytest.mark.parametrize("what", ["input", "weight"])
def test_an_input_or_weight_that_is_written_to_before_the_loss_is_refused(what: str) -> None:
    x, y = batch()
    net = Net("frozen").double()
    with chunked_losses():
        h = net.embedding(x)
        z = net.head(h)
        with torch.no_grad():
            (h if what == "input" else net.head.weight).mul_(2)
        with pytest.raises(LossError, match="written to in place since"):
            flat(z, y)
        with pytest.raises(LossError, match="written to in place since"):
            z.topk(2, -1)


def test_a_tensor_of_a_recorded_function_may_be_written_to_before_backward() -> None:
    x, y = batch()
    nets = Net().double(), Net().double()
    nets[1].load_state_dict(nets[0].state_dict())
    losses = []
    for place, net in enumerate(nets):
        bias, weight = WEIGHT.clone(), WEIGHT.clone()
        with chunked_losses(4 if place else 10**6):
            loss = flat(net(x) + bias, y, weight=weight)
            bias.zero_()
            weight.zero_()
            loss.backward()
        losses.append(state_of(net, loss))
    assert_exact(losses[1], losses[0])
    assert float(losses[0]["head.weight.grad"].abs().max()) > 0


def test_no_rows_and_one_vector_are_as_torch_has_them() -> None:
    net = Net().double()
    with chunked_losses() as report:
        empty = flat(net(torch.zeros((0, L), dtype=torch.long)), torch.zeros((0, L)).long())
        one = F.cross_entropy(net.head(torch.ones(D).double()), torch.tensor(3))
    assert empty.isnan()
    assert one.isfinite()
    assert not report.chunked


def test_an_empty_selection_of_rows_has_no_loss_and_no_gradient() -> None:
    x, y = batch()
    net = Net().double()
    none = torch.zeros_like(MASK)
    with chunked_losses():
        F.cross_entropy(net(x)[none], y[none], reduction="sum").backward()
    assert float(net.head.weight.grad.abs().max()) == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize("where", ["everywhere", "the model alone"])
def test_autocast_computes_what_it_computes_with_whole_logits(where: str) -> None:
    x, y = batch()
    found = []
    for rows in (None, 4):
        torch.manual_seed(1)
        net = Net()
        with chunked_losses(rows) if rows else torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16):
                z = net(x)
                loss = flat(z, y) if where == "everywhere" else None
            loss = flat(z.float(), y) if loss is None else loss
            loss.backward()
        found.append((loss.detach(), net.head.weight.grad, net.body.weight.grad))
    for mine, its in zip(*found, strict=True):
        assert mine is not None
        assert its is not None
        assert mine.dtype == its.dtype
        torch.testing.assert_close(mine, its, rtol=0.02, atol=1e-4)


def test_gradients_of_chunks_are_summed_in_float32() -> None:
    """4,096 equal rows, one a chunk: bfloat16 stops to add at 256 of them."""
    head = nn.Linear(1, 8, bias=True, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    h = torch.ones(4096, 1, dtype=torch.bfloat16)
    with chunked_losses(1, columns=8) as report:
        flat(head(h).float(), torch.zeros(4096, dtype=torch.long), reduction="sum").backward()
    assert report.chunked["cross_entropy"] == 1
    for grad in (head.weight.grad, head.bias.grad):
        assert grad is not None
        assert float(grad.flatten()[0]) == -4096 * 7 / 8


def test_evaluation_and_a_map_without_gradient_are_in_chunks() -> None:
    x, y = batch()
    net = Net().double()
    want = flat(net(x), y)
    with chunked_losses(4) as report, torch.no_grad():
        assert not net(x).requires_grad
        torch.testing.assert_close(flat(net(x), y), want.detach())
    assert report.chunked["cross_entropy"] == 1
    with chunked_losses(4), torch.inference_mode():
        torch.testing.assert_close(flat(net(x), y), want.detach())


def test_logits_without_a_gradient_get_none_later() -> None:
    x, y = batch()
    net = Net().double()
    with chunked_losses(4):
        with torch.no_grad():
            z = net(x)
        assert not flat(z, y).requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_head_inside_of_a_checkpoint_is_whole(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            found: Tensor = checkpoint(
                lambda h: self.head(torch.tanh(self.body(h))), h, use_reentrant=reentrant
            )
            return found

    report = compared(Checkpointed().double(), flat)
    assert not report.chunked


def test_a_loss_inside_of_a_checkpoint_is_whole() -> None:
    x, y = batch()
    net, other = Net().double(), Net().double()
    other.load_state_dict(net.state_dict())
    loss = flat(net(x), y)
    loss.backward()
    with chunked_losses(4) as report:
        found = checkpoint(lambda: flat(other(x), y), use_reentrant=False)
        found.backward()
    assert_exact(state_of(other, found), state_of(net, loss))
    assert not report.chunked


def test_peak_memory_is_that_of_a_chunk() -> None:
    """A vocabulary of 20,000 and 256 rows: 20 MB of logits, and three of them at once."""
    from anybatch.memory.meter import Meter

    head = nn.Linear(16, 20_000)
    peaks = {}
    for rows in (None, 8):
        h = torch.randn(256, 16, requires_grad=True)
        chunked = chunked_losses(rows) if rows else torch.enable_grad()
        with Meter(torch.device("cpu"), {"parameters": list(head.parameters())}) as meter, chunked:
            F.cross_entropy(head(h), torch.arange(256)).backward()
        peaks[rows] = meter.timeline().peak
        head.zero_grad()
    logits = 256 * 20_000 * 4
    assert peaks[None] > 2 * logits
    assert peaks[8] < logits


@pytest.mark.parametrize("hook", ["of the module", "of its backward", "of the logits"])
def test_hooks_on_logits_hear_their_gradient(hook: str) -> None:
    x, y = batch()
    found = []
    for rows in (None, 4):
        torch.manual_seed(1)
        net, heard = Net().double(), list[Tensor]()
        if hook == "of the module":
            net.head.register_forward_hook(lambda _, __, z: z * 2)
        if hook == "of its backward":
            net.head.register_full_backward_hook(lambda _, __, dz, to=heard: to.append(dz[0]))
        with chunked_losses(rows) if rows else torch.enable_grad():
            z = net(x)
            if hook == "of the logits":
                z.register_hook(lambda dz, to=heard: to.append(dz))
            loss = flat(z, y)
            loss.backward()
        found.append(state_of(net, loss) | {f"heard {at}": one for at, one in enumerate(heard)})
    assert_exact(found[1], found[0])


def test_person_s_function_modes_hear_the_loss() -> None:
    heard = []

    class Hear(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    x, y = batch()
    with Hear(), chunked_losses():
        flat(Net().double()(x), y).backward()
    assert "linear" in heard
    assert "cross_entropy" not in heard or heard.count("cross_entropy") == 1


@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_an_engine_is_as_without_the_context(memory: str | None) -> None:
    x, y = batch()
    net = Net().double()
    want = copy.deepcopy(net)
    loss = flat(want(x), y)
    loss.backward()
    with chunked_losses() as report:
        size = {"micro_batch": 2} if memory is None else {"memory": memory}
        engine = Engine(net, flat, **size)
        found = engine.backward(x, y)
    assert_exact(state_of(net, found), state_of(want, loss))
    assert engine.plan is not None
    assert engine.plan.exact
    assert not report.chunked


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"rows": 2.5}, {"columns": -1}, {"rows": "8"}])
def test_numbers_must_be_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="1 at least"), anybatch.chunked_losses(**wrong):
        pass


def test_narrow_maps_are_left_alone() -> None:
    with chunked_losses() as report:
        narrow = nn.Linear(8, 32)(torch.ones(3, 8))
    assert type(narrow) is Tensor
    assert not report.materialised


def test_logits_say_their_shape_without_being_computed() -> None:
    with chunked_losses() as report:
        z = nn.Linear(2, 50)(torch.ones(3, 2))
        assert "50" in repr(z)
        assert (z.shape, z.dtype, len(z), z.dim()) == ((3, 50), torch.float32, 3, 2)
        assert z.requires_grad
        assert not report.materialised
        assert z.tolist()
        assert report.materialised


def most_allocated(run: Callable[[], object]) -> int:
    """The most bytes that torch allocates at once in a call, without a mode around it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in events))


@pytest.mark.parametrize(("smoothing", "least", "most"), [(0.1, 2, 3.5), (0.0, 1, 1.5)])
def test_logits_of_a_chunk_are_let_go_before_backward(
    smoothing: float, least: float, most: float
) -> None:
    """Of three tensors of their size, and little else; of cross-entropy by classes one."""
    columns, rows = 1 << 14, 16
    h, w = torch.randn(64, 4, requires_grad=True), torch.randn(columns, 4, requires_grad=True)
    y = torch.randint(columns, (64,))

    def run() -> None:
        with chunked_losses(rows=rows):
            F.cross_entropy(F.linear(h, w), y, label_smoothing=smoothing).backward()

    run()
    h.grad = w.grad = None
    logits = (most_allocated(run) - w.nbytes) / (4 * columns * rows)
    assert least < logits < most


def test_the_gradient_of_a_tied_head_is_added_where_it_is() -> None:
    """Two tensors of the weight's size, as of torch's own step: a view of it would need three."""
    e, y = nn.Embedding(1 << 14, 64), torch.randint(1 << 14, (16,))

    def run() -> None:
        with chunked_losses(rows=1):
            F.cross_entropy(F.linear(e(y), e.weight), y).backward()

    run()
    e.weight.grad = None
    assert most_allocated(run) < 2.5 * e.weight.nbytes
