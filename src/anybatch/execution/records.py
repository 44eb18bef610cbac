"""Report of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from anybatch.core.plan import bar, card, table
from anybatch.core.units import show_bytes


@dataclass(frozen=True)
class StepReport:
    """Report of the last step: loss, sizes, time, peak and retries.

    Attributes:
        loss: loss of the full batch, a detached 0-dim tensor.
        samples: N_B, over all ranks.
        micro_batch: N_mu, samples in a micro-batch; after a retry, the last size.
        micro_batches: N_S, micro-batches of this rank.
        seconds: host time of the call; on CUDA the device may still be computing.
        peak_bytes: the most bytes held. On CUDA the peak of the allocator, or None where that is
            an earlier step's; on the CPU live bytes of tensors, measured in the first step
            after each forecast, else None.
        predicted_bytes: the forecast of the plan; None where there is no budget to plan with.
        moved_bytes: bytes of waiting micro-batches that were copied out of the device and back.
        remade_bytes: bytes that were recomputed from other saved tensors instead.
        retries: times that memory ran out, and a micro-batch or the step was retried, smaller.
        batchnorm: "exact" or "local".
    """

    loss: Tensor
    samples: int
    micro_batch: int
    micro_batches: int
    seconds: float
    peak_bytes: int | None
    predicted_bytes: int | None = None
    moved_bytes: int = 0
    remade_bytes: int = 0
    retries: int = 0
    batchnorm: str = "exact"

    def _repr_html_(self) -> str:
        """Return the notebook view: the measured peak next to the forecast, and the step."""
        held, foreseen = self.peak_bytes, self.predicted_bytes
        named = {
            "loss": f"{float(self.loss):.6g}",
            "samples": f"{self.samples} in {self.micro_batches} micro-batches of up to "
            f"{self.micro_batch}",
            "seconds": f"{self.seconds:.3g}",
        }
        optional = {
            "peak": None if held is None else show_bytes(held),
            "predicted": None if foreseen is None else show_bytes(foreseen),
            "moved": show_bytes(self.moved_bytes) if self.moved_bytes else None,
            "computed again": show_bytes(self.remade_bytes) if self.remade_bytes else None,
            "retries": str(self.retries) if self.retries else None,
        }
        named |= {name: value for name, value in optional.items() if value is not None}
        measured = held is not None and foreseen is not None
        return card(
            "last step",
            bar((("held", held),), foreseen) if measured and held and foreseen else "",
            table({**named, "batchnorm": self.batchnorm}),
        )
