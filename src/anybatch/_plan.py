"""A plan is data: what a step will do and why, decided by a pure function, printed, saved, loaded.

The executor obeys it and decides nothing. Facts go in, a frozen `Plan` comes out; neither knows
torch, so a decision can be tested, stored beside a run, and explained like a database's query plan.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Facts:
    """What a decision rests on.

    Attributes:
        micro_batch: samples in a micro-batch.
        divided: the batch is larger than a micro-batch.
        loss: the loss in words.
        coupled: the loss needs all outputs at once.
        late: a denominator is known only at the end of the batch.
        half: names of dtypes of half-precision parameters.
        before: gradients were there when the step began.
        local: BatchNorm layers that normalise each micro-batch by itself.
    """

    micro_batch: int
    divided: bool
    loss: str
    coupled: bool
    late: bool
    half: tuple[str, ...]
    before: bool
    local: int


@dataclass(frozen=True)
class Plan:
    """How a mini-batch is trained.

    Attributes:
        micro_batch: samples in a micro-batch; the last one of a batch may be smaller.
        mechanism: "streaming" (one pass), "gathering" (two passes), or "undivided".
        accumulate: "in place" in ``.grad``, or "accumulator" (one more set of gradients).
        loss: the loss in words.
        exact: whether the gradient is that of the undivided batch.
        reasons: why, a sentence each.
    """

    micro_batch: int
    mechanism: str
    accumulate: str
    loss: str
    exact: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        rows = {
            "micro-batch": f"{self.micro_batch} samples",
            "mechanism": self.mechanism,
            "gradients": self.accumulate,
            "loss": self.loss,
            "exact": "yes" if self.exact else "no",
        }
        lines = [f"  {name:<12} {value}" for name, value in rows.items()]
        return "\n".join(["plan", *lines, *(f"  because      {r}" for r in self.reasons)])

    def to_json(self) -> str:
        """Return the plan as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: `text` is not a plan; the message says which names must be there.
        """
        fields = tuple(cls.__dataclass_fields__)
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a plan must be JSON, and it is not: {error}") from error
        if not isinstance(found, dict) or set(found) != set(fields):
            came = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"a plan must hold {sorted(fields)}, and it holds {came}")
        return cls(**{**found, "reasons": tuple(found["reasons"])})


def decide(facts: Facts) -> Plan:
    """Return the plan for `facts`."""
    reasons = []
    if not facts.divided:
        reasons.append("the batch is no larger than a micro-batch: torch's own step")
    elif facts.coupled:
        reasons.append(
            "the loss is not known to be a sum over samples: it is computed once on all outputs, "
            "and a second forward pass hands out its gradient. Loss.per_sample or Loss.ratio "
            "would save that pass"
        )
    else:
        reasons.append("the loss is a sum over samples: one pass")
    if facts.late:
        reasons.append("samples are loaded on the way: the denominator is made good at the end")
    if facts.half and facts.divided:
        reasons.append(f"{', '.join(facts.half)} gradients are summed in float32 and cast once")
    if facts.before:
        reasons.append("gradients were there before: they are set aside and added to at the end")
    if facts.local:
        reasons.append(
            f"{facts.local} BatchNorm layers normalise each micro-batch by itself, as asked for by "
            'batchnorm="local": the gradient is not that of the undivided batch'
        )
    literal = facts.loss.startswith("MBS Algorithm 1")
    if literal:
        reasons.append("Algorithm 1 to the letter: exact only where all micro-batches are equal")
    return Plan(
        micro_batch=facts.micro_batch,
        mechanism=_mechanism(facts),
        accumulate="accumulator" if (facts.half and facts.divided) or facts.before else "in place",
        loss=facts.loss,
        exact=not facts.local and not literal,
        reasons=tuple(reasons),
    )


def _mechanism(facts: Facts) -> str:
    if not facts.divided:
        return "undivided"
    return "gathering" if facts.coupled else "streaming"
