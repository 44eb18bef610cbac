"""State of an engine in a checkpoint, so that a resumed run is the run that was interrupted.

The model, the optimizer and the random generators have states of their own. An engine adds what its
steps have found out: the fastest plan, the size at which memory ran out, and whether training has
converged, for adaptive BatchNorm. It has no random generator and no counter of its own.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from anybatch.core.plan import Plan
from anybatch.engine.executor import Runner
from anybatch.engine.inputs import StepInputs
from anybatch.lockstep.sync_batchnorm import Adaptive
from anybatch.planner.earlier_plans import run_plan_of
from anybatch.planner.planner import Planner

FORMAT = 1


class Resumable:
    """Base of an engine, with the state that a checkpoint holds."""

    micro_batch: int | None
    _inputs: StepInputs
    _planner: Planner | None
    _plan: Plan | None
    _runner: Runner
    _steady: Plan | None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to be the same run, in plain values.

        Save it with those of the model, the optimizer and the random generators, between two steps.

        Example:
            >>> torch.save({"model": model.state_dict(), "engine": engine.state_dict()}, path)
        """
        plan, norms = self._steady or self._plan, self._inputs.norms
        return {
            "format": FORMAT,
            "parameters": _parameters(self._inputs.model),
            "plan": None if plan is None else plan.to_json(),
            "limit": self._runner.limit,
            "adaptive": norms.state_dict() if isinstance(norms, Adaptive) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: call it before the first step of an engine made alike.

        The plan is followed if the engine has the budget that it was made for, and searched anew if
        it has another, or a ``micro_batch=``.

        Args:
            state: the result of `state_dict`.

        Raises:
            ValueError: it is none, or that of another model or another mode of BatchNorm.
        """
        plan, limit, adaptive = _checked(state, self._inputs.model)
        norms = self._inputs.norms
        if (adaptive is not None) != isinstance(norms, Adaptive):
            made = "adaptive" if adaptive is not None else "exact or local"
            raise ValueError(
                "the state of an engine must be of the same mode of BatchNorm, and it is of the "
                f"{made} one: pass the batchnorm= that the interrupted run had"
            )
        if self.micro_batch is not None:
            self.micro_batch = min(self.micro_batch, limit or self.micro_batch)
        elif plan is not None:
            self._follow(plan)
        if isinstance(norms, Adaptive):
            norms.load_state_dict(adaptive)

    def _follow(self, plan: Plan) -> None:
        """Follow a plan as one that is passed in, if it is of the same budget."""
        old, memory = self._planner, plan.memory
        if old is None or memory is None or old.budget not in (None, memory.budget):
            return
        settled = run_plan_of(plan)
        planner = Planner(
            memory.budget,
            timed=old.timed,
            settled=settled,
            rungs=old.rungs,
            workspaces=old.workspaces,
        )
        planner.spill = old.spill
        self._planner, self._plan, self._steady = planner, plan, plan


def _parameters(model: nn.Module) -> dict[str, list[int]]:
    """Return name -> shape of the parameters of a model."""
    lazy = nn.parameter.is_lazy
    return {n: [] if lazy(p) else list(p.shape) for n, p in model.named_parameters()}


def _checked(state: Any, model: nn.Module) -> tuple[Plan | None, int, Any]:
    """Return the plan, the limit and the state of adaptive BatchNorm of a saved state.

    Raises:
        ValueError: it is none of this model.
    """
    try:
        version, text, limit = state["format"], state["plan"], int(state["limit"])
        saved, adaptive = state["parameters"], state["adaptive"]
        plan = None if text is None else Plan.from_json(text)
        damaged = version != FORMAT or not isinstance(saved, dict)
        if adaptive is not None:
            Adaptive().load_state_dict(adaptive)
    except (TypeError, KeyError, ValueError, AttributeError):
        damaged = True
    if damaged:
        raise ValueError(
            "the state of an engine must be what engine.state_dict() returned in this version, and "
            "this one is damaged or another: leave load_state_dict out, and the plan is made anew"
        )
    there = _parameters(model)
    if saved != there:
        names = [name for name in {**saved, **there} if saved.get(name) != there.get(name)]
        raise ValueError(
            "the state of an engine must be of the same model, and "
            f"{names[0] if names else 'the order of its parameters'} is another: load the state "
            "that was saved with this model, or leave load_state_dict out"
        )
    return plan, limit, adaptive
