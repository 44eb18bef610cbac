"""Networks of which one sample is long: of transformers where it has them, with small widths.

Nothing is drawn (no dropout), so that every way has the same gradient. A language model has a
vocabulary of 32,000.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.mbs.models import UNet

VOCABULARY, FEATURES, LAYERS, HEADS, IGNORED = 32_000, 128, 4, 4, -100
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
IMAGE_FEATURES, PATCH, CLASSES = 64, 4, 10
BLOCK_FEATURES = 64


class Network(nn.Module):
    """A model that returns logits, and the parts that other libraries treat apart.

    Attributes:
        inner: the model.
        mlps: modules of single tokens.
        body: returns the features before the head; None where a head is small.
        head: the weight of the head; None where a head is small.
        blocks: what is checkpointed; empty where transformers does it.
    """

    def __init__(
        self,
        inner: nn.Module,
        mlps: list[nn.Module],
        body: nn.Module | None = None,
        blocks: list[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.parts: dict[str, Any] = {"mlps": mlps, "body": body, "blocks": blocks or []}

    @property
    def head(self) -> Tensor | None:
        """The weight of a head with a vocabulary."""
        head = getattr(self.inner, "lm_head", None)
        return None if head is None else head.weight

    def hidden(self, x: Tensor) -> Tensor:
        """Return the features before the head."""
        out = self.parts["body"](x)
        found: Tensor = out if isinstance(out, Tensor) else out.last_hidden_state
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out = self.inner(x)
        found: Tensor = out if isinstance(out, Tensor) else out.logits
        return found

    def checkpoint(self) -> None:
        """Recompute blocks in backward: as transformers does, or with `torch.utils.checkpoint`."""
        if isinstance(self.inner, Block | UNet):
            for block in self.parts["blocks"]:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            return
        inner: Any = self.inner
        new = getattr(inner, "activation_checkpointing_enable", None)
        (new or inner.gradient_checkpointing_enable)()


class Block(nn.Module):
    """An embedding, one block of torch's transformer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        wide = BLOCK_FEATURES
        layer = nn.TransformerEncoderLayer(
            *(wide, HEADS, 4 * wide), dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.Sequential(nn.Embedding(VOCABULARY, wide), layer)
        self.lm_head = nn.Linear(wide, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        found: Tensor = self.lm_head(self.body(x))
        return found


@dataclass(frozen=True)
class Task:
    """A network, one sample, and its loss."""

    network: Network
    inputs: Tensor
    targets: Tensor

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        if outputs.dim() == 4:
            return F.binary_cross_entropy_with_logits(outputs, targets)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def _tokens(network: Network, length: int) -> Task:
    tokens = torch.randint(VOCABULARY, (1, length + 1))
    targets = tokens[:, 1:].clone()
    targets[:, : length // 5] = IGNORED
    return Task(network, tokens[:, :-1].clone(), targets)


def block(length: int) -> Task:
    """One block of torch's transformer and a head, on tokens."""
    inner = Block()
    return _tokens(Network(inner, [], inner.body, [inner.body[1]]), length)


def llama(length: int) -> Task:
    """A Llama of four layers, on tokens."""
    inner: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=FEATURES,
            intermediate_size=4 * FEATURES,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=length,
            **SIZES,
        )
    )
    mlps = [layer.mlp for layer in inner.model.layers]
    return _tokens(Network(inner, mlps, inner.model), length)


def gpt2(length: int) -> Task:
    """A GPT-2 of four layers, with one matrix for embedding and head, on tokens."""
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    inner: Any = GPT2LMHeadModel(
        GPT2Config(
            *(), n_positions=length, n_embd=FEATURES, n_layer=LAYERS, n_head=HEADS, **none, **SIZES
        )
    )
    mlps = [layer.mlp for layer in inner.transformer.h]
    return _tokens(Network(inner, mlps, inner.transformer), length)


def vit(patches: int) -> Task:
    """A vision transformer of four layers, on a square image of so many patches."""
    pixels = PATCH * round(patches**0.5)
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    inner: Any = ViTForImageClassification(
        ViTConfig(
            image_size=pixels,
            patch_size=PATCH,
            hidden_size=IMAGE_FEATURES,
            intermediate_size=4 * IMAGE_FEATURES,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_labels=CLASSES,
            **none,
        )
    )
    network = Network(inner, [layer.mlp for layer in inner.vit.layers])
    return Task(network, torch.randn(1, 3, pixels, pixels), torch.randint(CLASSES, (1,)))


def unet(pixels: int) -> Task:
    """A U-Net of width 8, on a square image of so many pixels a side."""
    inner = UNet()
    network = Network(inner, [], None, [*inner.down, *inner.mix])
    y = (torch.rand(1, 1, pixels, pixels) > 0.7).float()
    return Task(network, torch.randn(1, 3, pixels, pixels), y)


NETWORKS: dict[str, tuple[Callable[[int], Task], str]] = {
    "block": (block, "block, {0:,} tokens"),
    "Llama": (llama, "Llama, {0:,} tokens"),
    "GPT-2": (gpt2, "GPT-2, {0:,} tokens"),
    "ViT": (vit, "ViT, {0:,} patches"),
    "U-Net": (unet, "U-Net, {0} x {0} pixels"),
}
"""Network -> what makes it, and the title of a row."""

ROWS = {
    "block": (512,),
    "Llama": (512, 2048, 8192, 32768),
    "GPT-2": (512, 2048, 8192),
    "ViT": (576, 2304, 9216),
    "U-Net": (128, 256, 512),
}
SMALL = {"block": 40, "Llama": 40, "GPT-2": 40, "ViT": 16, "U-Net": 32}
"""Of a step that only loads what torch loads late."""


def made(name: str, length: int) -> Task:
    """Return a network and a sample, of the same numbers in every process."""
    torch.manual_seed(0)
    return NETWORKS[name][0](length)
