"""Models of Transformers with random weights: a family each, made small; nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mbs.honest.subjects import ROWS, SUBJECTS, Problem, Subject

V, T, D = 41, 6, 16
SIZE = {
    "hidden_size": D,
    "intermediate_size": 2 * D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": V,
    "max_position_embeddings": 32,
}
CALM = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout"),
    0.0,
)
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FEW = {"num_key_value_heads": 1}


class Causal(nn.Module):
    """A language model whose scores stand at each token."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[n, t] each -> [n, t, vocabulary]."""
        found = self.inner(input_ids=ids, attention_mask=mask, return_dict=True)
        logits: Tensor = found.logits if "logits" in found else found.last_hidden_state
        return logits


class Both(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, mask: Tensor, after: Tensor) -> Tensor:
        """[n, t] each -> [n, t, vocabulary]."""
        found = self.inner(input_ids=ids, attention_mask=mask, decoder_input_ids=after)
        logits: Tensor = found.logits
        return logits


class Images(nn.Module):
    """A classifier of images."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, 3, h, w] -> [n, classes]."""
        logits: Tensor = self.inner(pixel_values=pixels).logits
        return logits


def _loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def _texts() -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([6, 4, 2, 5, 6, 3, 1])
    mask = torch.arange(T)[None] < lengths[:, None]
    return torch.randint(3, V, (ROWS, T)).where(mask, 0), mask.long()


def _made(model: str, config: str, /, **options: Any) -> nn.Module:
    """A model with its dropout at 0."""
    import transformers

    eager = options.pop("eager", False)
    settings = getattr(transformers, config)(**options)
    if eager:
        settings._attn_implementation = "eager"
    settings._experts_implementation = "eager"
    found: nn.Module = getattr(transformers, model)(settings)
    for module in found.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return found.train()


def text(model: str, config: str, /, **options: Any) -> Callable[[], Problem]:
    def make() -> Problem:
        inner, (ids, mask) = _made(model, config, **options), _texts()
        found = Causal(inner)
        with torch.no_grad():
            shape = found(ids, mask).shape
        labels = torch.randint(shape[-1], shape[:-1])
        if len(shape) == 3:
            labels = labels.where(mask > 0, -100)
        return Problem(found, (ids, mask), labels, _loss)

    return make


def both(model: str, config: str, /, **options: Any) -> Callable[[], Problem]:
    def make() -> Problem:
        ids, mask = _texts()
        after, labels = torch.randint(3, V, (2, ROWS, T))
        found = Both(_made(model, config, decoder_start_token_id=1, **options))
        return Problem(found, (ids, mask, after), labels.where(mask > 0, -100), _loss)

    return make


def pixels(model: str, config: str, side: int = 16, /, **options: Any) -> Callable[[], Problem]:
    def make() -> Problem:
        found = Images(_made(model, config, num_labels=3, **options))
        labels = torch.randint(3, (ROWS,))
        return Problem(found, torch.randn(ROWS, 3, side, side), labels, _loss)

    return make


GPT = {"n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": V, **IDS}
CALM_GPT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
BART = {
    "d_model": D,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "vocab_size": V,
    **IDS,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 32,
    "encoder_ffn_dim": D,
    "decoder_ffn_dim": D,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
T5 = {
    "d_model": D,
    "d_kv": 8,
    "d_ff": D,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": V,
    "dropout_rate": 0.0,
    **IDS,
}
PATCHES = {
    **{key: SIZE[key] for key in SIZE if key not in ("vocab_size", "max_position_embeddings")},
    "image_size": 16,
    "patch_size": 4,
    **CALM,
}
STAGES = {"hidden_sizes": [4, 8], "depths": [1, 1]}
LLAMA = {**SIZE, **FEW, **IDS, "attention_dropout": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": D}
FAMILIES: dict[str, Callable[[], Problem]] = {
    "GPT-2": text("GPT2LMHeadModel", "GPT2Config", **GPT, **CALM_GPT),
    "GPT-2, eager": text("GPT2LMHeadModel", "GPT2Config", **GPT, **CALM_GPT, eager=True),
    "GPT-Neo": text(
        *("GPTNeoForCausalLM", "GPTNeoConfig"),
        **{"hidden_size": D, "num_layers": 2, "num_heads": 2, "vocab_size": V, **IDS},
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32,
        window_size=3,
        embed_dropout=0.0,
        resid_dropout=0.0,
        attention_dropout=0.0,
    ),
    "GPT-NeoX": text("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZE, **CALM, **IDS),
    "GPT-J": text("GPTJForCausalLM", "GPTJConfig", **GPT, **CALM_GPT, rotary_dim=4),
    "OPT": text(
        *("OPTForCausalLM", "OPTConfig"),
        **{key: value for key, value in SIZE.items() if key != "intermediate_size"},
        **{"ffn_dim": D, "word_embed_proj_dim": D, "dropout": 0.0, **IDS},
    ),
    "BLOOM": text(
        *("BloomForCausalLM", "BloomConfig"),
        **{"hidden_size": D, "n_layer": 2, "n_head": 2, "vocab_size": V, **IDS},
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "Llama": text("LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "Mistral, sliding window": text(
        "MistralForCausalLM", "MistralConfig", **LLAMA, sliding_window=3
    ),
    "Qwen2": text("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
    "Qwen3": text("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=8),
    "Gemma": text("GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=8),
    "Gemma 2": text("Gemma2ForCausalLM", "Gemma2Config", **LLAMA, head_dim=8),
    "Phi": text("PhiForCausalLM", "PhiConfig", **LLAMA),
    "Phi-3": text("Phi3ForCausalLM", "Phi3Config", **LLAMA),
    "StableLM": text("StableLmForCausalLM", "StableLmConfig", **LLAMA),
    "OLMo": text("OlmoForCausalLM", "OlmoConfig", **LLAMA),
    "Cohere": text("CohereForCausalLM", "CohereConfig", **LLAMA),
    "Granite": text("GraniteForCausalLM", "GraniteConfig", **LLAMA),
    "Falcon": text("FalconForCausalLM", "FalconConfig", **SIZE, **CALM, **IDS),
    "Mixtral": text("MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4),
    "Qwen2-MoE": text("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **LLAMA, **EXPERTS, num_experts=4),
    "OLMoE": text("OlmoeForCausalLM", "OlmoeConfig", **LLAMA, num_experts=4, num_experts_per_tok=2),
    "Mamba": text(
        *("MambaForCausalLM", "MambaConfig"),
        **{"hidden_size": D, "num_hidden_layers": 1, "state_size": 4, "vocab_size": V, **IDS},
    ),
    "BERT": text("BertForMaskedLM", "BertConfig", **SIZE, **CALM),
    "BERT, classes": text("BertForSequenceClassification", "BertConfig", **SIZE, **CALM),
    "RoBERTa": text("RobertaForMaskedLM", "RobertaConfig", **SIZE, **CALM),
    "ALBERT": text("AlbertForMaskedLM", "AlbertConfig", **SIZE, **CALM, embedding_size=8),
    "ELECTRA": text("ElectraForMaskedLM", "ElectraConfig", **SIZE, **CALM, embedding_size=8),
    "DeBERTa-v2": text(
        *("DebertaV2ForMaskedLM", "DebertaV2Config"),
        **{**SIZE, **CALM, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        eager=True,
    ),
    "DistilBERT": text(
        *("DistilBertForMaskedLM", "DistilBertConfig"),
        dim=D,
        n_layers=2,
        n_heads=2,
        hidden_dim=D,
        vocab_size=V,
        dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=32,
    ),
    "MPNet": text("MPNetForMaskedLM", "MPNetConfig", **SIZE, **CALM, eager=True),
    "ModernBERT": text("ModernBertForMaskedLM", "ModernBertConfig", **SIZE, **IDS),
    "T5": both("T5ForConditionalGeneration", "T5Config", **T5),
    "mT5, gated": both("MT5ForConditionalGeneration", "MT5Config", **T5),
    "BART": both("BartForConditionalGeneration", "BartConfig", **BART),
    "Pegasus": both("PegasusForConditionalGeneration", "PegasusConfig", **BART),
    "Marian": both("MarianMTModel", "MarianConfig", **BART),
    "ViT": pixels("ViTForImageClassification", "ViTConfig", **PATCHES),
    "DeiT": pixels("DeiTForImageClassification", "DeiTConfig", **PATCHES),
    "BEiT": pixels(
        *("BeitForImageClassification", "BeitConfig"), **{**PATCHES, "drop_path_rate": 0.0}
    ),
    "DINOv2": pixels("Dinov2ForImageClassification", "Dinov2Config", **PATCHES),
    "Swin": pixels(
        *("SwinForImageClassification", "SwinConfig"),
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        **{"num_heads": [2, 2], "window_size": 4, "drop_path_rate": 0.0, **CALM},
    ),
    "ConvNeXt, transformers": pixels(
        "ConvNextForImageClassification", "ConvNextConfig", 32, **STAGES, num_stages=2
    ),
    "ResNet, transformers": pixels(
        *("ResNetForImageClassification", "ResNetConfig"),
        **{**STAGES, "embedding_size": 4, "layer_type": "basic"},
    ),
    "RegNet": pixels(
        "RegNetForImageClassification",
        "RegNetConfig",
        32,
        **STAGES,
        embedding_size=4,
        groups_width=4,
    ),
    "MobileNetV2": pixels(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", 32, depth_multiplier=0.1
    ),
    "PoolFormer": pixels(
        *("PoolFormerForImageClassification", "PoolFormerConfig", 32),
        hidden_sizes=[4, 8, 8, 8],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.0,
    ),
}


def register() -> None:
    """Register every family; one that the installed Transformers has not cannot be made."""
    for name, make in FAMILIES.items():
        full = f"{name}, transformers" if name in SUBJECTS else name
        SUBJECTS[full] = Subject(full, "transformers", make)
