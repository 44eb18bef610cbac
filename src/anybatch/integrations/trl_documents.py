"""Documents in one row, which TRL joins without padding, as rows of a batch that can be divided.

With ``padding_free`` or ``packing`` by best fit TRL joins all documents of a batch in one row, and
restarts their positions. A row cannot be divided, so here each packed sequence stays a row:

    TRL      0 1 2 0 1 | 0 1 2 3                positions of one row
    here     0 1 2 0 1 / 0 1 2 3 0              of two rows; padding is a document of one token

A model that separates documents by their positions computes the same for both; in any other model
documents would see each other. So before the first step one document is run with other tokens
before it and without, and both results are compared.

Source: TRL 1.16, ``DataCollatorForLanguageModeling``; transformers 5.23,
``find_packed_sequence_indices``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from anybatch.errors import NotExactError
from anybatch.integrations.transformers_padding import evaluating

Rows = dict[str, Any]


class Documents(DataCollatorForLanguageModeling):  # type: ignore[misc]
    """Collates rows of documents that positions distinguish."""

    def torch_call(self, examples: list[Rows]) -> Rows:
        """Return padded rows; the first token of a document is not predicted."""
        rows: Rows = super().torch_call(examples)
        rows["labels"][rows["position_ids"] == 0] = -100
        return rows


def separates(model: nn.Module, rows: Rows) -> bool:
    """Say whether a row of several documents is there to compare, and compare one with itself.

    Raises:
        NotExactError: a document has other log-probs by itself than behind another one in its row.
    """
    places, ids = rows["position_ids"], rows["input_ids"]
    begins = (places[:, :-1] == 0) & (places[:, 1:] == 1)
    several = (begins.sum(1) > 1).nonzero()
    if not len(several):
        return False
    at = int(several[0])
    first = int(begins[at].nonzero()[1])
    after = (places[at, first + 1 :] == 0).nonzero()
    last = first + 1 + int(after[0]) if len(after) else ids.shape[1]
    row, own = slice(at, at + 1), slice(first, last)
    # Other tokens before the document: kernels on the same shapes round it alike, in any dtype
    # (test_a_coarse_model_that_mixes_packed_documents_is_refused).
    least, most = ids[row].min(), ids[row].max()
    changed = ids[row].clone()
    changed[:, :first] = torch.where(changed[:, :first] == least, most, least)
    with torch.no_grad(), evaluating(model):
        here = _log_probs(model, ids[row], places[row])[0, first : last - 1]
        other = _log_probs(model, changed, places[row])[0, first : last - 1]
        single = _log_probs(model, ids[row, own], places[row, own])[0]
    _refuse_mixed(here, other, {torch.float32})
    # Alone it has another shape: log-probs of a model in bfloat16 are as coarse as the model
    # (test_packed_documents_of_a_coarse_model_are_told_apart).
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    _refuse_mixed(here, single, {single.dtype, *types})
    return True


def _log_probs(model: nn.Module, ids: Tensor, places: Tensor) -> Tensor:
    device = next(model.parameters()).device
    ids = ids.to(device)
    found: Tensor = model(
        input_ids=ids,
        position_ids=places.to(device),
        labels=ids,
        use_cache=False,
        fused_lm_head=True,
    ).log_probs
    return found


def _refuse_mixed(one: Tensor, other: Tensor, types: set[torch.dtype]) -> None:
    """Refuse log-probs of a document that differ by more than the coarsest of the types rounds.

    Raises:
        NotExactError: they do.
    """
    gap, eps = float((one - other).abs().max()), max(torch.finfo(type_).eps for type_ in types)
    if not gap <= eps**0.5 * max(1.0, float(other.abs().max())):
        raise NotExactError(
            "a model must tell documents in one row apart by their position_ids, and the log-probs "
            f"of one differ by {gap:.2g} behind another one and by itself: set padding_free=False "
            'and packing_strategy="wrapped", or take attn_implementation="sdpa"'
        )
