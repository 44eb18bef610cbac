"""`anybatch.chunked_losses` in the language models that people run, none of them changed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anybatch import chunked_losses

transformers = pytest.importorskip(
    "transformers", reason="pip install transformers is needed for these tests"
)

V = 512
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
SHORT = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
GROUPED = SMALL | {"num_key_value_heads": 2}
STILL = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BART = {"vocab_size": V, "d_model": 32, "max_position_embeddings": 128, "dropout": 0.0} | {
    f"{part}_{what}": number
    for part in ("encoder", "decoder")
    for what, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Llama, tied": ("LlamaForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "Gemma": ("GemmaForCausalLM", GROUPED | {"head_dim": 8}),
    "Gemma 2, a soft cap": (
        "Gemma2ForCausalLM",
        GROUPED | {"head_dim": 8, "final_logit_softcapping": 30.0},
    ),
    "Gemma 3": ("Gemma3ForCausalLM", GROUPED | {"head_dim": 8}),
    "Qwen 2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen 3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "Mistral": ("MistralForCausalLM", GROUPED),
    "Phi": ("PhiForCausalLM", SMALL | {"embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "Phi 3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "GPT-J": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", SMALL),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 128,
        }
        | {"attention_types": [[["global"], 2]], "resid_dropout": 0.0, "embed_dropout": 0.0}
        | {"attention_dropout": 0.0},
    ),
    "OPT": ("OPTForCausalLM", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "Bloom": (
        "BloomForCausalLM",
        {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "Falcon": ("FalconForCausalLM", SHORT | {"num_attention_heads": 4}),
    "Cohere, scaled logits": ("CohereForCausalLM", GROUPED | {"logit_scale": 0.1}),
    "OLMo": ("OlmoForCausalLM", GROUPED),
    "OLMo 2": ("Olmo2ForCausalLM", GROUPED),
    "StableLM": ("StableLmForCausalLM", GROUPED),
    "StarCoder 2": (
        "Starcoder2ForCausalLM",
        GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "Granite, scaled logits": ("GraniteForCausalLM", GROUPED | {"logits_scaling": 2.0}),
    "Mamba": ("MambaForCausalLM", SHORT),
    "BERT": ("BertForMaskedLM", STILL),
    "RoBERTa": ("RobertaForMaskedLM", STILL),
    "ELECTRA": ("ElectraForMaskedLM", STILL | {"embedding_size": 32}),
    "ALBERT": ("AlbertForMaskedLM", STILL | {"embedding_size": 32}),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        {"vocab_size": V, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
        | {"dropout": 0.0, "attention_dropout": 0.0},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "BART, a bias of logits": ("BartForConditionalGeneration", BART),
    "Marian, a bias of logits": (
        "MarianMTModel",
        BART | {"pad_token_id": 0, "decoder_start_token_id": 0},
    ),
}


class KeepDouble(TorchFunctionMode):
    """The oracle keeps float64 where a model casts its logits to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "float" and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def labels(ids: Tensor) -> Tensor:
    """Return labels of some tokens of the first row and of none of the last: a chunk has none."""
    found = ids.clone()
    found[0, 9:] = -100
    found[2] = -100
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_this_family_gets_the_gradient_of_whole_logits(name: str) -> None:
    model, options = FAMILIES[name]
    cls = getattr(transformers, model)
    torch.manual_seed(0)
    net = cls(cls.config_class(**options)).double().train()
    ids = torch.randint(5, V, (3, 20))
    found = []
    for context in (nullcontext(), chunked_losses(8)):
        net.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with KeepDouble(), context as report:
            loss = net(input_ids=ids, labels=labels(ids)).loss
            loss.backward()
        found.append(state_of(net, loss))
    assert report is not None
    assert dict(report.chunked) == {"cross_entropy": 1}
    assert not report.materialised
    assert_exact(found[1], found[0])
