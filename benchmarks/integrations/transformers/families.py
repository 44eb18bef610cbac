"""Small Transformers models of every kind with random weights, and rows to train them on.

Nothing is downloaded: configurations are built here, texts are random tokens of uneven lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Row = dict[str, Tensor]
VOCABULARY, LONGEST = 53, 11
FILL = {"labels": -100, "input_ids": 0, "attention_mask": 0}
SIZE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Family:
    """A family of models: how one is made, and rows of its data by seed."""

    name: str
    model: Callable[[], nn.Module]
    rows: Callable[[int, int], list[Row]]


def collate(rows: list[Row]) -> Row:
    """A batch: what is of uneven length is padded to the longest, on the right."""
    return {name: padded([row[name] for row in rows], FILL.get(name, 0)) for name in rows[0]}


def padded(column: list[Tensor], fill: int) -> Tensor:
    if column[0].dim() != 1:
        return torch.stack(column)
    longest = max(len(one) for one in column)
    return torch.stack([torch.cat([x, x.new_full((longest - len(x),), fill)]) for x in column])


def texts(count: int, seed: int) -> list[Tensor]:
    """Token ids of uneven lengths."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LONGEST + 1, (count,), generator=rng).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=rng) for n in lengths]


def language(count: int, seed: int) -> list[Row]:
    """Labels are the tokens themselves; of every third row the first half is a prompt."""
    return [
        {
            "input_ids": text,
            "attention_mask": torch.ones_like(text),
            "labels": torch.where(torch.arange(len(text)) < prompt(i, text), -100, text),
        }
        for i, text in enumerate(texts(count, seed))
    ]


def prompt(place: int, text: Tensor) -> int:
    return len(text) // 2 if place % 3 == 0 else 0


def masked(count: int, seed: int) -> list[Row]:
    """A few tokens of each text are to be guessed; of some texts none."""
    rng = torch.Generator().manual_seed(seed)
    rows = language(count, seed)
    for row in rows:
        text = row["input_ids"]
        hidden = torch.rand(text.shape, generator=rng) < 0.3
        row["labels"] = torch.where(hidden, text, -100)
        row["input_ids"] = torch.where(hidden, 1, text)
    return rows


def with_labels(label: Callable[[Tensor, torch.Generator], Row]) -> Callable[[int, int], list[Row]]:
    """Texts with what `label` gives for each."""

    def rows(count: int, seed: int) -> list[Row]:
        rng = torch.Generator().manual_seed(seed)
        return [
            {"input_ids": text, "attention_mask": torch.ones_like(text), **label(text, rng)}
            for text in texts(count, seed)
        ]

    return rows


def one_class(_text: Tensor, rng: torch.Generator) -> Row:
    return {"labels": torch.randint(3, (), generator=rng)}


def one_number(_text: Tensor, rng: torch.Generator) -> Row:
    return {"labels": torch.randn((), generator=rng)}


def some_classes(_text: Tensor, rng: torch.Generator) -> Row:
    return {"labels": torch.rand(1, 3, generator=rng).round().squeeze(0)}


def tags(text: Tensor, _rng: torch.Generator) -> Row:
    return {"labels": torch.where(text % 5 == 0, -100, text % 3)}


def spans(text: Tensor, rng: torch.Generator) -> Row:
    """Where an answer begins and ends; beyond the text where there is none."""
    at = torch.randint(2 * len(text), (2,), generator=rng)
    at = torch.where(at < len(text), at, 99)
    return {"start_positions": at[0], "end_positions": at[1]}


def images(size: int) -> Callable[[int, int], list[Row]]:
    def rows(count: int, seed: int) -> list[Row]:
        rng = torch.Generator().manual_seed(seed)
        return [
            {
                "pixel_values": torch.randn(3, size, size, generator=rng),
                "labels": torch.randint(3, (), generator=rng),
            }
            for _ in range(count)
        ]

    return rows


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    calm = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    size = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return made(GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, **size, **calm, **ids))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return made(LlamaForCausalLM, LlamaConfig(vocab_size=VOCABULARY, **SIZE))


def mixtral() -> nn.Module:
    """A mixture of experts, which are to be used evenly: that part of its loss is no small one."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = MixtralConfig(vocab_size=VOCABULARY, **SIZE, **experts, num_key_value_heads=2)
    config._experts_implementation = "eager"  # the other kernels know no float64
    return made(MixtralForCausalLM, config)


def bert(head: str, **more: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        import transformers

        size = {**SIZE, **CALM, "max_position_embeddings": 16, "vocab_size": VOCABULARY}
        config = transformers.BertConfig(**{**size, **more})
        return made(getattr(transformers, head), config)

    return model


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    start = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return made(T5ForConditionalGeneration, T5Config(vocab_size=VOCABULARY, **size, **start))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SIZE, **CALM, image_size=8, patch_size=4, num_labels=3)
    return made(ViTForImageClassification, config)


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}
    config = ResNetConfig(**sizes, layer_type="basic", num_labels=3)
    return made(ResNetForImageClassification, config)


def made(model_class: Any, config: Any) -> nn.Module:
    """A model with the same random weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = model_class(config)
    return model


CLASSES = bert("BertForSequenceClassification", num_labels=3)
FAMILIES = [
    Family("GPT-2", gpt2, language),
    Family("Llama", llama, language),
    Family("Mixtral, experts", mixtral, language),
    Family("BERT, masked tokens", bert("BertForMaskedLM"), masked),
    Family("BERT, classes", CLASSES, with_labels(one_class)),
    Family(
        "BERT, a number",
        bert("BertForSequenceClassification", num_labels=1),
        with_labels(one_number),
    ),
    Family("BERT, several labels", CLASSES, with_labels(some_classes)),
    Family("BERT, tags", bert("BertForTokenClassification", num_labels=3), with_labels(tags)),
    Family("BERT, answers", bert("BertForQuestionAnswering"), with_labels(spans)),
    Family("T5", t5, language),
    Family("ViT", vit, images(8)),
    Family("ResNet, BatchNorm", resnet, images(16)),
]
