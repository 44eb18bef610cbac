"""Kernels of torch on one row, at all the strides that a dimension of size 1 may have.

What a micro-batch of one sample shows to a kernel, the undivided batch never does. The truth is the
same row among two rows, of which only the first has a gradient, in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tests.oracle import assert_exact, error_of, state_after, tolerance, undivided
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from anybatch import Engine
from anybatch.execution import strides
from anybatch.execution.strides import FORMATS, StandardStrides, one_row, standard

C = 4
IMAGES = {1: (C, 9), 2: (C, 5, 6), 3: (C, 3, 4, 5)}
ODD = (0, 3, 1000)


@pytest.fixture(autouse=True)
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step run that another test may have left behind: in it torch's kernels are right."""
    monkeypatch.setattr(strides._KERNELS, "steps", set())


class Case(NamedTuple):
    """A function of rows and parameters.

    Attributes:
        call: of rows [n, ...] and parameters.
        shape: of a row.
        parameters: their shapes.
        single: the truth is the row by itself, at the usual strides: here samples meet.
    """

    call: Callable[..., Tensor]
    shape: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...] = ()
    single: bool = False


def positive(x: Tensor) -> Tensor:
    return x.detach().abs() + 0.5


def classes(x: Tensor) -> Tensor:
    return (10 * x.detach().abs()).long().sum(1) % C


def convolutions(d: int) -> Iterator[tuple[str, Case]]:
    conv, back = getattr(F, f"conv{d}d"), getattr(F, f"conv_transpose{d}d")
    wide, one, image = (3,) * d, (1,) * d, IMAGES[d]
    yield "conv", Case(partial(conv, padding=1), image, ((6, C, *wide), (6,)))
    yield "pointwise conv", Case(conv, image, ((6, C, *one), (6,)))
    yield "strided conv", Case(partial(conv, stride=2), image, ((6, C, *wide), (6,)))
    yield "dilated conv", Case(partial(conv, dilation=2, padding=2), image, ((6, C, *wide), (6,)))
    yield "grouped conv", Case(partial(conv, groups=2), image, ((6, C // 2, *wide), (6,)))
    yield "depthwise conv", Case(partial(conv, groups=C), image, ((C, 1, *wide), (C,)))
    yield "transposed conv", Case(partial(back, stride=2), image, ((C, 6, *wide), (6,)))
    yield "transposed depthwise conv", Case(partial(back, groups=C), image, ((C, 1, *wide), (C,)))


def pools(d: int) -> Iterator[tuple[str, Case]]:
    def of(name: str, *args: Any) -> Case:
        function = getattr(F, f"{name}{d}d")
        return Case(lambda x: function(x, *args), IMAGES[d])

    yield "max_pool", of("max_pool", 2)
    yield "padded max_pool", of("max_pool", 3, 2, 1)
    yield "avg_pool", of("avg_pool", 3, 2, 1)
    yield "adaptive_avg_pool", of("adaptive_avg_pool", 2)
    yield "adaptive_avg_pool to one", of("adaptive_avg_pool", 1)
    yield "adaptive_max_pool", of("adaptive_max_pool", 2)
    yield "lp_pool", of("lp_pool", 2, 2)


def norms(d: int) -> Iterator[tuple[str, Case]]:
    image, two, four = IMAGES[d], ((C,),) * 2, ((C,),) * 4

    def evaluated(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(x, mean.detach(), positive(var), w, b)

    def by_image(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.instance_norm(x, mean.detach(), positive(var), w, b, use_input_stats=False)

    yield "batch_norm in eval", Case(evaluated, image, four)
    yield (
        "batch_norm",
        Case(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), image, two, single=True),
    )
    yield (
        "batch_norm without weights",
        Case(lambda x: F.batch_norm(x, None, None, training=True), image, single=True),
    )
    yield "instance_norm", Case(lambda x, w, b: F.instance_norm(x, None, None, w, b), image, two)
    yield "instance_norm in eval", Case(by_image, image, four)
    yield "group_norm", Case(lambda x, w, b: F.group_norm(x, 2, w, b), image, two)


def others(d: int) -> Iterator[tuple[str, Case]]:
    image = IMAGES[d]

    def weighted(x: Tensor, w: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(x, 1), classes(x), positive(w), reduction="none")

    for mode in ("reflect", "replicate", "circular"):
        yield f"{mode} pad", Case(partial(F.pad, pad=(1,) * 2 * d, mode=mode), image)
    for name in ("gelu", "glu", "softplus"):
        function = getattr(F, name)
        yield name, Case((lambda x, f=function: f(x, 1)) if name == "glu" else function, image)
    yield "prelu", Case(F.prelu, image, ((C,),))
    yield "softmax", Case(partial(F.softmax, dim=1), image)
    yield "log_softmax", Case(partial(F.log_softmax, dim=-1), image)
    yield "cross_entropy", Case(lambda x: F.cross_entropy(x, classes(x), reduction="none"), image)
    yield "weighted nll_loss", Case(weighted, image, ((C,),))
    linear = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[d]
    for mode in ("nearest", "nearest-exact", *linear):
        for factor in (2, 0.5):
            resize = partial(F.interpolate, scale_factor=factor, mode=mode)
            yield f"{mode} times {factor}", Case(resize, image)
    for mode in linear:
        corners = partial(F.interpolate, scale_factor=2, mode=mode, align_corners=True)
        yield f"{mode} with corners", Case(corners, image)
        if d == 2:
            smooth = partial(F.interpolate, scale_factor=0.5, mode=mode, antialias=True)
            yield f"{mode} with antialias", Case(smooth, image)


def of_modules() -> Iterator[tuple[str, Case]]:
    def case(
        module: nn.Module, shape: tuple[int, ...], inputs: int = 1, *, t: bool = False
    ) -> Case:
        named = [name for name, _ in module.named_parameters()]

        def call(x: Tensor, *parameters: Tensor) -> Tensor:
            rows = x.transpose(0, 1) if t else x
            out = functional_call(
                module, dict(zip(named, parameters, strict=True)), (rows,) * inputs
            )
            out = out[0] if isinstance(out, tuple) else out
            return out.transpose(0, 1) if t else out

        return Case(call, shape, tuple(tuple(p.shape) for p in module.parameters()))

    for variant in (nn.LSTM, nn.GRU, nn.RNN):
        yield variant.__name__, case(variant(9, 5, batch_first=True), IMAGES[1])
        yield f"{variant.__name__} by time", case(variant(9, 5), IMAGES[1], t=True)
        deep = variant(9, 5, 2, batch_first=True, bidirectional=True)
        yield f"{variant.__name__} both ways", case(deep, IMAGES[1])
    yield "attention", case(nn.MultiheadAttention(8, 2, batch_first=True), (5, 8), 3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    yield "transformer layer", case(layer, (5, 8))
    yield "dropout that is off", case(nn.Dropout().eval(), IMAGES[2])


def rest() -> Iterator[tuple[str, Case]]:
    line, image, heads = IMAGES[1], IMAGES[2], (2, 5, 8)

    def grid(x: Tensor) -> Tensor:
        found = torch.linspace(-1, 1, 24, dtype=x.dtype).view(1, 3, 4, 2).expand(len(x), -1, -1, -1)
        return F.grid_sample(x, found, align_corners=False)

    def fold(x: Tensor) -> Tensor:
        return F.fold(x.flatten(2)[:, :, :4], (3, 3), 2)

    def embedding(x: Tensor, w: Tensor) -> Tensor:
        return F.embedding((10 * x.detach().abs()).long() % 7, w) + x.unsqueeze(-1)

    def bag(x: Tensor, w: Tensor) -> Tensor:
        return F.embedding_bag((10 * x.detach().abs()).long() % 7, w) + x[:, :5]

    def unpool(x: Tensor) -> Tensor:
        return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)

    def ctc(x: Tensor) -> Tensor:
        targets, lengths = torch.tensor([[1, 2]]).expand(len(x), 2), torch.full((len(x),), 2)
        outputs = F.log_softmax(x.permute(2, 0, 1), -1)
        return F.ctc_loss(outputs, targets, torch.full((len(x),), 9), lengths, reduction="none")

    def attention(x: Tensor, w: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(x, x * w, x.sin(), **how)

    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    yield "sdpa", Case(attention, heads, ((8,),))
    yield "causal sdpa", Case(partial(attention, is_causal=True), heads, ((8,),))
    yield "masked sdpa", Case(partial(attention, attn_mask=mask), heads, ((8,),))
    yield "layer_norm", Case(lambda x, w, b: F.layer_norm(x, (9,), w, b), line, ((9,),) * 2)
    yield "wide layer_norm", Case(lambda x, w: F.layer_norm(x, image, w), image, (image,))
    yield "rms_norm", Case(lambda x, w: F.rms_norm(x, (9,), w), line, ((9,),))
    yield "local_response_norm", Case(partial(F.local_response_norm, size=2), image)
    yield "linear", Case(F.linear, (9,), ((5, 9), (5,)))
    yield "linear of tokens", Case(F.linear, line, ((5, 9), (5,)))
    yield "linear without bias", Case(F.linear, line, ((5, 9),))
    yield "bilinear map", Case(lambda x, w: F.bilinear(x, x, w), (5,), ((3, 5, 5),))
    yield "bmm", Case(lambda x: torch.bmm(x.transpose(1, 2), x), line)
    yield "einsum", Case(lambda x, w: torch.einsum("ncl,kc->nkl", x, w), line, ((5, C),))
    yield "cdist", Case(lambda x: torch.cdist(x, x + 1), line)
    yield "pixel_shuffle", Case(partial(F.pixel_shuffle, upscale_factor=2), image)
    yield "pixel_unshuffle", Case(lambda x: F.pixel_unshuffle(x[:, :, :4], 2), image)
    yield "channel_shuffle", Case(partial(torch.channel_shuffle, groups=2), image)
    yield "unfold", Case(partial(F.unfold, kernel_size=3), image)
    yield "fold", Case(fold, image)
    yield "grid_sample", Case(grid, image)
    yield "max_unpool2d", Case(unpool, image)
    yield "embedding", Case(embedding, (6,), ((7, 5),))
    yield "embedding_bag", Case(bag, (6,), ((7, 5),))
    yield "ctc_loss", Case(ctc, line)
    yield "normalize", Case(F.normalize, image)
    yield "cumsum", Case(lambda x: x.cumsum(-1), image)
    yield "logsumexp", Case(lambda x: x.logsumexp(1), image)
    yield "sort", Case(lambda x: x.sort(-1).values, image)
    yield "amax", Case(lambda x: x.amax((2, 3)), image)
    yield "var", Case(lambda x: x.var((2, 3)), image)
    yield "fft", Case(lambda x: torch.fft.rfft2(x).abs(), image)
    yield "roll", Case(lambda x: x.roll((1, 2), (2, 3)), image)


OF_IMAGES = (convolutions, pools, norms, others)
CASES = {f"{name}, {d}d": case for make in OF_IMAGES for d in IMAGES for name, case in make(d)}
CASES |= dict([*of_modules(), *rest()])
WRONG = {f"{name}, {d}d" for d in (2, 3) for name, _ in norms(d) if name != "group_norm"}
REASON = "torch: native_batch_norm_backward reads a row in another memory format than it is in"


def strided(t: Tensor, first: int) -> Tensor:
    return t.as_strided(t.shape, (first, *t.stride()[1:]))


def stored(t: Tensor, *order: int) -> Tensor:
    """Return the tensor with its dimensions in this order in memory, the outermost first."""
    return t.permute(order).contiguous().permute([order.index(d) for d in range(t.dim())])


def as_new(t: Tensor, memory: torch.memory_format) -> Tensor:
    """Return the tensor as a new one of a memory format, channels last of 4 or 5 dimensions."""
    if memory == torch.contiguous_format or t.dim() not in FORMATS:
        return t.contiguous()
    new = torch.empty_like(t, memory_format=FORMATS[t.dim()])
    return new.copy_(t)


def layouts(row: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a row in its usual formats, at odd strides of the dimension of size 1, and cut out."""
    inner = range(1, row.dim())
    orders = {"rows first": (0, *inner)}
    if row.dim() > 2:
        orders |= {"channels last": (0, *inner[1:], 1), "reversed": (0, *reversed(inner))}
    for name, order in orders.items():
        dense = stored(row, *order)
        yield name, dense
        yield from ((f"{name}, stride {first}", strided(dense, first)) for first in ODD)
    if row.dim() > 1:
        yield "sliced", torch.stack([row, row + 1], -1)[..., 0]
        yield "transposed", stored(row, 1, 0, *inner[1:])
        yield "second of three", torch.cat([row + 1, row, row])[1:2]
    if row.dim() > 2:
        tokens = row.flatten(2).transpose(1, 2).contiguous()
        yield "tokens", tokens.transpose(1, 2).unflatten(2, row.shape[2:])


def expanded(shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients as sums and means make them."""
    torch.manual_seed(5)
    yield "of a sum", torch.randn(1, dtype=torch.float64).expand(shape)
    if len(shape) > 2:
        tokens = shape[2:].numel()
        channels = torch.randn(1, shape[1], dtype=torch.float64)
        yield "of a mean", channels.view(1, -1, *[1] * len(shape[2:])).expand(shape)
        mean = channels.unsqueeze(1).expand(1, tokens, shape[1]) / tokens
        yield "of a mean of tokens", mean.transpose(1, 2).unflatten(2, shape[2:])


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype at the same strides."""
    length = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((length,), (1,)).to(dtype).as_strided(t.shape, t.stride())


def wrong(case: Case, dtype: torch.dtype) -> list[str]:
    """Return the layouts at which a kernel is further from the truth than at the usual one."""
    torch.manual_seed(3)
    rows = torch.randn(2, *case.shape, dtype=torch.float64)
    parameters = [0.5 * torch.randn(p, dtype=torch.float64) + 0.1 for p in case.parameters]
    like = case.call(rows, *parameters)[:1]
    inputs = torch.randn_like(like)

    def found(x: Tensor, dy: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [cast(t.detach(), dtype).requires_grad_() for t in (x, *parameters)]
        y = case.call(*leaves)
        dx, *others = torch.autograd.grad(y, leaves, cast(dy, dtype), allow_unused=True)
        each = {"y": y[:1].detach(), "dx": dx[:1]} | dict(zip("abcd", others, strict=False))
        return {name: t for name, t in each.items() if t is not None}

    def usual(dy: Tensor, dtype: torch.dtype, memory: torch.memory_format) -> dict[str, Tensor]:
        x, dy = rows[:1] if case.single else rows, dy.clone(memory_format=torch.contiguous_format)
        if not case.single:
            dy = torch.cat([dy, torch.zeros_like(dy)])
        return found(*(as_new(t, memory) for t in (x, dy)), dtype)

    def bound(dy: Tensor) -> tuple[dict[str, Tensor], float]:
        truth = usual(dy, torch.float64, torch.contiguous_format)
        if dtype == torch.float64:
            return truth, tolerance()
        both = (torch.contiguous_format, torch.channels_last)
        noise = [max(error_of(usual(dy, dtype, memory), truth).values()) for memory in both]
        return truth, tolerance(dict(zip("ab", noise, strict=True)))

    bad = []
    same = bound(inputs)
    gradients = [(name, dy, same) for name, dy in layouts(inputs)]
    gradients += [(name, dy, bound(dy)) for name, dy in expanded(like.shape)]
    for of_x, x in layouts(rows[:1]):
        for of_dy, dy, (truth, most) in gradients:
            if {of_x, of_dy} & {"rows first", "channels last"}:
                worst = max(error_of(found(x, dy, dtype), truth).values())
                bad += [] if worst <= most else [f"x {of_x}, dy {of_dy}: {worst:.1e}"]
    return bad


MARKED = [
    pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=REASON) if name in WRONG else ())
    for name in CASES
]


@pytest.mark.product
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", MARKED)
def test_torch_takes_a_row_by_itself_as_it_takes_it_among_two(
    name: str, dtype: torch.dtype
) -> None:
    assert wrong(CASES[name], dtype) == []


@pytest.mark.product
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", sorted(WRONG))
def test_in_a_step_it_does_so_where_torch_by_itself_does_not(name: str, dtype: torch.dtype) -> None:
    with StandardStrides():
        one_row()
        assert wrong(CASES[name], dtype) == []
    assert wrong(CASES[name], dtype), "torch's kernel is its own again"


def test_the_kernel_of_exported_programs_is_wrong_and_mended_alike() -> None:
    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        statistics = torch.zeros(2, C, dtype=x.dtype).unbind()
        out: Tensor = torch.ops.aten._batch_norm_with_update(x, w, b, *statistics, 0.1, 1e-5)[0]
        return out

    case = Case(call, IMAGES[2], ((C,),) * 2, single=True)
    assert wrong(case, torch.float64)
    with StandardStrides():
        one_row()
        assert wrong(case, torch.float64) == []


@pytest.mark.parametrize("shape", [(1, 4, 3, 5), (2, 4, 1, 5), (1, 1, 3, 5), (1, 4, 1, 1), (1, 4)])
def test_standard_strides_are_those_of_a_new_tensor_and_nothing_is_copied(
    shape: tuple[int, ...],
) -> None:
    for _, x in layouts(torch.randn(shape)) if shape[0] == 1 else [("", torch.randn(shape))]:
        found = standard(x)
        assert torch.equal(found, x)
        assert found.data_ptr() == x.data_ptr()
        if found is not x:
            new = torch.empty(shape).contiguous(memory_format=torch.channels_last)
            assert new.stride() == found.stride() or 1 in shape[1:]


class Tokens(nn.Module):
    """Images, a normalisation, and the mean over what a transformer calls tokens."""

    def __init__(self, norm: nn.Module, d: int = 2) -> None:
        super().__init__()
        self.conv = getattr(nn, f"Conv{d}d")(3, 8, 3, 2, 1, bias=False)
        self.norm, self.head = norm, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, ...] -> [n, 4]."""
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        found: Tensor = self.head(
            torch.cat([tokens, tokens.sigmoid()]).mean(1).view(2, -1, 8).sum(0)
        )
        return found


def frozen(d: int = 2) -> nn.Module:
    norm: nn.Module = getattr(nn, f"BatchNorm{d}d")(8)
    norm(2 * torch.randn(9, 8, *(3,) * d) + 1)
    return norm.eval()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm2d": lambda: Tokens(nn.BatchNorm2d(8)),
    "BatchNorm3d": lambda: Tokens(nn.BatchNorm3d(8), 3),
    "BatchNorm2d without weights": lambda: Tokens(nn.BatchNorm2d(8, affine=False)),
    "BatchNorm2d in eval": lambda: Tokens(frozen()),
    "BatchNorm3d in eval": lambda: Tokens(frozen(3), 3),
    "InstanceNorm2d": lambda: Tokens(nn.InstanceNorm2d(8, affine=True)),
    "InstanceNorm3d": lambda: Tokens(nn.InstanceNorm3d(8), 3),
    "GroupNorm": lambda: Tokens(nn.GroupNorm(2, 8)),
    "one in eval behind one in training": lambda: Tokens(
        nn.Sequential(nn.BatchNorm2d(8), frozen(), nn.InstanceNorm2d(8))
    ),
}


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", NORMS)
def test_a_micro_batch_of_one_is_exact(
    name: str, layout: torch.memory_format, micro_batch: int
) -> None:
    model = NORMS[name]().double()
    d = model.conv.weight.dim() - 2
    x, y = torch.randn(5, 3, *(6,) * d).double(), torch.randint(4, (5,))
    if layout == torch.channels_last:
        x = stored(x, 0, *range(2, d + 2), 1)

    def step(copied: nn.Module) -> Tensor:
        engine = Engine(copied, F.cross_entropy, micro_batch=micro_batch)
        loss = engine.backward(x, y)
        assert engine.plan is not None
        assert engine.plan.exact
        return loss

    got = state_after(model, step)
    assert_exact(got, undivided(model, F.cross_entropy, x, y), noise(model, x, y))


def noise(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """The error between two undivided runs whose rows are permuted."""
    turned = undivided(model, F.cross_entropy, x.flip(0), y.flip(0))
    return error_of(turned, undivided(model, F.cross_entropy, x, y))


def test_a_batch_of_one_is_exact_where_torch_is_not() -> None:
    model = NORMS["BatchNorm2d in eval"]().double()
    x, y = torch.randn(1, 3, 6, 6).double(), torch.randint(4, (1,))
    twice = undivided(model, F.cross_entropy, x.repeat(2, 1, 1, 1), y.repeat(2))
    got = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=1).backward(x, y))
    assert_exact(got, twice)


def test_local_statistics_of_one_sample_are_its_own() -> None:
    model = NORMS["BatchNorm2d"]().double()
    x, y = torch.randn(3, 3, 6, 6).double(), torch.randint(4, (3,))
    by_image = Tokens(nn.InstanceNorm2d(8, affine=True)).double()
    by_image.load_state_dict(model.state_dict(), strict=False)

    def step(copied: nn.Module) -> Tensor:
        engine = Engine(copied, F.cross_entropy, micro_batch=1, batchnorm="local")
        return engine.backward(x, y)

    got = {n: t for n, t in state_after(model, step).items() if "(buffer)" not in n}
    assert_exact(got, undivided(by_image, F.cross_entropy, x, y))


def test_a_step_that_ends_in_another_thread_does_not_end_this_one() -> None:
    name = "batch_norm in eval, 2d"
    with StandardStrides():
        one_row()

        def other() -> None:
            with StandardStrides():
                pass

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert wrong(CASES[name], torch.float64) == []
    assert wrong(CASES[name], torch.float64)
