"""Planner from a budget in bytes to a micro-batch, decided once for each signature.

The first batch is forecast (`anybatch.planner.forecast`), and the first steps find the fastest size
that fits (`anybatch.planner.search`, `anybatch.planner.decision`), unless a plan that was passed in
decides it already. Batches of other signatures follow:

    another batch size, such as a last partial one     the same plan
    smaller samples (shorter sequences)                bounded by forecasts of larger ones
    larger samples                                     foreseen, at the next power of two

A bound holds because a kernel on fewer elements needs no more memory. So 500 random lengths cost a
handful of rehearsals, and every one of them keeps within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import torch

from anybatch.core.status import say
from anybatch.core.units import show_bytes, show_samples
from anybatch.errors import NotExactError
from anybatch.execution.signature import Case, RunPlan, Signature
from anybatch.execution.single_sample import SINGLE_SAMPLE
from anybatch.memory.ledger import StepTimeline
from anybatch.memory.spill import Spill
from anybatch.planner.budget import Foreseen, default_budget
from anybatch.planner.earlier_plans import LAST, EarlierPlans, Followed
from anybatch.planner.forecast import WORKSPACE
from anybatch.planner.full_batch import PEAKS
from anybatch.planner.ladder import REAL
from anybatch.planner.memory_model import PlanningRequest
from anybatch.planner.rehearsal import of_one_decision
from anybatch.planner.resident_memory import depict
from anybatch.planner.search import MicroBatchSearch
from anybatch.planner.ways import Ways
from anybatch.planner.workspaces import Workspaces

SLACK = 0.05
"""Share of its forecast that a step which is measured again may hold more, within the budget."""

RUNGS = ("chunks", "tiles", "offload")
"""Ways to hold less than a step in micro-batches does."""

OTHER_MODEL = "the model is another one than was planned, so the next steps are planned anew"
BY_VALUES = (
    "its memory depends on the values of a batch, so the next ones are planned by the most that "
    "one has held"
)


class Planner:
    """Planner with a budget, and the forecasts and decisions within it.

    Args:
        budget: bytes; None is a share of the free memory of the device at the first batch.
        fixed: required samples in a micro-batch; None (default) chooses.
        timed: steps in different sizes may show the fastest. Default True.
        settled: decisions of an earlier plan; no forecast for the first batch.
        rungs: those of `RUNGS` that may be planned; an attribute, too. Default: all.
        share: of the free memory. Default None: the default share.
        workspaces: of convolutions; an attribute, too. Default None: new ones.

    Attributes:
        spill: store of offloaded tensors.
        earlier: plans of earlier starts, and of this one; None (default) where none are stored.
        two_pass: an earlier plan has found that the loss needs all outputs at once.
    """

    def __init__(
        self,
        budget: int | None,
        *,
        fixed: int | None = None,
        timed: bool = True,
        settled: RunPlan | None = None,
        rungs: Collection[str] = RUNGS,
        share: float | None = None,
        workspaces: Workspaces | None = None,
    ) -> None:
        self.spill, self.rungs = Spill("auto" if "offload" in rungs else "off"), rungs
        self.workspaces, self._missing = workspaces or Workspaces(), 0
        self.budget, self.source, self._part = budget, "as given", share
        self.timed, self.thorough = timed, False
        self._settled, self._passed_in = settled, settled is not None
        self.two_pass = settled is not None and settled.coupled
        self.earlier: EarlierPlans | None = None
        self._varied = self._renewed = self._forgot = self._corrected = False
        search = MicroBatchSearch(fixed, sends=bool(settled and settled.offload))
        self._ways = Ways(search, self.workspaces)
        self._planned: dict[Signature, RunPlan] = {}
        self._ran: set[tuple[Signature, int]] = set()

    @contextmanager
    def timing(self, wanted: bool) -> Iterator[None]:  # noqa: FBT001
        """Let steps tell the seconds of many sizes in the body, or of none; then as before."""
        was, self.timed, self.thorough = self.timed, wanted, wanted
        try:
            yield
        finally:
            self.timed, self.thorough = was, False

    @property
    def _search(self) -> MicroBatchSearch:
        return self._ways.search

    @property
    def _foreseen(self) -> Foreseen:
        return self._ways.foreseen

    @property
    def decided(self) -> int:
        """Forecasts made, and decisions of a plan passed in: each is worth a measurement."""
        return self._search.decided

    @property
    def fastest(self) -> int | None:
        """Samples in the fastest micro-batch so far, for batches like the first one; or None."""
        return self._search.chosen and self._search.chosen[0]

    def plan_for(
        self,
        signature: Signature,
        make_case: Callable[[], Case],
        optimizer: torch.optim.Optimizer | None,
        refuse_division: Callable[[], object],
        *,
        follow: bool = False,
    ) -> RunPlan:
        """Return how a batch of this signature is run.

        Args:
            signature: of the batch.
            make_case: returns the case of a dry run; called without a forecast.
            optimizer: its state counts, as it will be.
            refuse_division: raises where the batch must not be divided.
            follow: a step follows: take the plan of an earlier start, if any, and foresee no sizes
                that it does not need. Default False: earlier starts are followed no more for it.

        Raises:
            BudgetError: not even a micro-batch of one sample fits.
        """
        signature = self._foreseen.plain(signature)
        if not follow:
            self._followed(signature).give_up()  # the plan that a person has asked for is followed
        found = self.planned(signature)
        if found is None or not (follow or found.memory.floor):
            self._say_stopped(signature)
            case = cache(make_case)
            if self._settled is not None:
                self.budget, self.source = self._settled.memory.budget, self._settled.memory.source
            elif self.budget is None:
                self.budget, self.source = default_budget(case(), optimizer, self._part)
            timed = self.timed and not torch.are_deterministic_algorithms_enabled()
            request = PlanningRequest(
                *(signature, case, optimizer, refuse_division, self.budget, self.source),
                *(self.spill, timed, self.thorough, follow),
            )
            request = self._ways.present(request)
            with of_one_decision():
                found = self.workspaces.within(request.budget, partial(self._decide, request))
            knows = self._foreseen.knows(signature)
            foreseen = self._foreseen.bound(signature) if knows else None
            found = self.workspaces.settle(found, foreseen, signature)
            # Another plan was wrong, so the engine measures this one
            # (test_the_first_step_of_the_smaller_plan_is_measured).
            self._search.decided += signature.most > 0
            self._planned[self._foreseen.plain(signature)] = found
        return found

    def planned(self, signature: Signature) -> RunPlan | None:
        """Return the plan that an earlier start or step had; None where there is none."""
        signature = self._foreseen.plain(signature)
        if signature.most or signature.global_samples:
            return self._planned.get(signature)
        followed, search = self._followed(signature), self._search
        found, last = followed.next(), followed.earlier.get(LAST)
        if found is None:
            return self._planned.get(signature)
        search.decided += followed.steps == 0  # metered, as every first step is
        if search.chosen is None:
            fastest = last or found
            search.chosen = fastest.micro_batch, signature.elements
            search.sends = fastest.offload is not None
        found = found.with_more(self._missing)
        self._planned[signature] = found
        self._ways.take(found, trains=signature.trains)
        return found

    def timeline(self, signature: Signature) -> StepTimeline | None:
        """Return the timeline of a step of this signature.

        None without a forecast, and for a plan passed in that offloads saved tensors.
        """
        signature = self._foreseen.plain(signature)
        planned, foreseen = self._planned.get(signature), self._foreseen.bound(signature)
        if planned is None or foreseen is None or (planned.offload and not planned.passes):
            return None
        held = dict(planned.memory.owners).get(WORKSPACE, 0)
        more = max(0, held - foreseen.constant.get(WORKSPACE, 0))
        return depict(foreseen.completed(signature, more), planned, signature.size)

    def varies(self, signature: Signature) -> bool:
        """Say whether the bytes of a planned step may depend on the values of its batch."""
        planned = self._planned.get(self._foreseen.plain(signature))
        return planned is not None and _may_vary(planned)

    def left(self, signature: Signature) -> int:
        """Return the bytes of the budget that a planned step is not foreseen to hold."""
        memory = self._planned[self._foreseen.plain(signature)].memory
        return max(0, memory.budget - memory.predicted)

    def limit(self, signature: Signature, states: int, *, again: bool = False) -> int | None:
        """Return the most bytes of a step; None where no smaller one would hold less.

        Its arguments are those of `learn`.
        """
        signature = self._foreseen.plain(signature)
        foreseen, planned = self._foreseen.bound(signature), self._planned[signature]
        size, smaller = signature.size, {1, planned.micro_batch // 2} - {0, planned.micro_batch}
        if (
            again and self._followed(signature).next()
        ):  # without a forecast, and it stops where that did
            less = not planned.lanes and bool(smaller)
        elif foreseen is None or not (again or foreseen.full_batch or _may_vary(planned)):
            return None
        else:
            less = any(foreseen.peak(n, size) < planned.memory.predicted for n in smaller)
            less |= bool(smaller) and foreseen.full_batch
        return planned.memory.budget - planned.states_to_add(states) if less else None

    def _followed(self, signature: Signature) -> Followed:
        """Return the plans of earlier starts for a signature, and those of this one."""
        return Followed({}) if self.earlier is None else self.earlier.of(signature)

    def learn(
        self,
        signature: Signature,
        peak: int,
        states: int,
        samples: int,
        *,
        again: bool = False,
        stopped: bool = False,
        inspected: bool = True,
    ) -> bool:
        """Record the measured peak of a step; bytes above the prediction are added to forecasts.

        Args:
            signature: of the step.
            peak: bytes.
            states: bytes of them that are the optimizer's; the first step has none yet.
            samples: that were computed at once.
            again: the model may be another one than was planned. Default False.
            stopped: it was stopped at the limit, and run smaller. Default False.
            inspected: the model was, in an earlier step. Default True.

        Returns:
            Whether forecasts were dropped, of a model that is another one now.
        """
        signature = self._foreseen.plain(signature)
        planned = self._planned[signature]
        coming = planned.states_to_add(states)
        missing = peak + coming - planned.memory.predicted
        stopped &= again
        fits = peak + coming <= planned.memory.budget
        follows = self._followed(signature).next() is not None
        # Else a start that is measured at another step would not go the way of an earlier one
        # (test_five_starts_end_in_the_same_bits).
        no_news = again and fits and (follows or missing <= SLACK * planned.memory.predicted)
        if (missing <= 0 or no_news) and not stopped:
            return False
        varies = _may_vary(planned)
        # An inspected model that needs more than when it was planned takes turns with another.
        renews = again and not varies and not (inspected and self._forgot)
        if renews and self._forget(signature):
            held = "was stopped at its budget" if stopped else f"held {show_bytes(peak)}"
            _say_more(held, planned, OTHER_MODEL)
            return True
        if varies and not self._varied:
            self._varied = True
            _say_more(f"held {show_bytes(peak + coming)}", planned, BY_VALUES)
        self._hold_more(signature, max(0, missing), samples, peak + coming)
        return False

    def _hold_more(self, signature: Signature, missing: int, samples: int, held: int) -> None:
        """Add bytes to forecasts, because a planned step has held so many in all."""
        planned = self._planned[signature]
        varies = _may_vary(planned)
        self._corrected = True
        self._missing += missing if signature.trains else 0
        followed = self._followed(signature)
        if followed.next() is not None:
            if followed.most() + missing <= planned.memory.budget:
                return
            followed.give_up()
            self._search.chosen, self._search.sends = None, False
        self._ways.unchunked = None
        del self._planned[signature]
        if varies and planned.lanes and not self._renewed:
            self._renewed = True
            self._foreseen.forget()  # lanes that wait hold more, too: rows of such values show it
        else:
            self._foreseen.hold_more(missing, samples if varies and not planned.lanes else 0)
        self._search.dry_runs.clear()
        obeyed = self._search.chosen is not None and not self._foreseen.rehearsed
        if obeyed and held <= planned.memory.budget:
            # A caller's plan is obeyed for as long as it keeps to its own budget
            # (test_what_a_step_has_held_more_is_not_forgotten_where_a_plan_is_obeyed).
            self._settled = replace(planned, memory=replace(planned.memory, predicted=held))

    def _forget(self, signature: Signature) -> bool:
        """Drop all forecasts, of a model that has changed; not where a plan is obeyed."""
        if self._passed_in and not self._foreseen.rehearsed:
            return False
        self._followed(signature).give_up()
        self._forgot = True
        self._foreseen.forget()
        self._planned.clear()
        # Another start that follows the plans up to here goes on alike
        # (test_two_starts_of_a_model_that_grows_are_planned_alike).
        self._ways.search = self._search.ended()
        self._ways.unchunked = None
        return True

    def writes(self, signature: Signature) -> bool:
        """Return whether forward writes to its inputs, or the loss to its targets."""
        foreseen = self._foreseen.bound(self._foreseen.plain(signature))
        return foreseen is not None and foreseen.inspection.copies

    def trial(self, signature: Signature) -> bool:
        """Return whether the next step of a signature is a trial."""
        search = self._search
        if search.trial is None:
            return False
        return search.is_of(self._foreseen.plain(signature)) or search.scaled(signature) > 0

    def gives_up(self, signature: Signature, error: Exception) -> bool:
        """Give up the size or place of a step that has failed; return False where nothing is left.

        The next attempt is planned without it. An error that is not the size's comes again.
        """
        signature, search = self._foreseen.plain(signature), self._search
        planned, size = self._planned[signature], signature.size
        n, memory = planned.micro_batch, planned.memory
        trial = search.trial if self.trial(signature) else None
        required = search.fixed is not None or (self._passed_in and not self._foreseen.rehearsed)
        if required or (n >= size and trial is None):
            return False
        own = (signature, n) in self._ran and not isinstance(error, NotExactError)
        if trial and trial not in search.seconds and search.best() is not None:
            search.fail(trial)
        elif not search.no_single_rows and str(error).startswith(SINGLE_SAMPLE):
            search.no_single_rows = True
        elif own or memory.undivided > memory.budget or signature in search.undivided:
            return False
        else:
            search.undivided.add(signature)
        self._followed(signature).give_up()
        first = str(error).strip().split("\n")[0]
        how = f"micro-batches of {show_samples(n)} of {size}"
        say(f"{how} cannot be run, so others are: {type(error).__name__}: {first}")
        self._planned.clear()
        return True

    def took(
        self,
        signature: Signature,
        n: int,
        seconds: float | None,
        *,
        failed: bool,
        run_plan: RunPlan | None = None,
    ) -> None:
        """Record the seconds of a step, by which the next ones are decided while a search lasts.

        Args:
            signature: of the step.
            n: samples in its micro-batches.
            seconds: of its computing; None where it was metered.
            failed: memory ran out before, and this step was a smaller one.
            run_plan: how it was run; None (default) for a trial that did not train.
        """
        search, signature = self._search, self._foreseen.plain(signature)
        self._ran.add((signature, n))
        if self.earlier is not None and run_plan is not None:
            # A step that has held more than its plan says is no plan for later ones.
            settled = signature in self._planned and search.trial is None
            if failed:  # another start may have the memory, and would go another way
                self.earlier = None
            else:
                if self._followed(signature).next() is None:
                    run_plan = run_plan.with_more(self._missing)
                    self._missing = 0  # forecasts of later steps have it
                self.earlier.done(signature, run_plan, settled=settled)
        if search.trial is None:
            return
        if not search.is_of(signature):
            if seconds is None or failed or search.scaled(signature) != n:
                return  # it fits in smaller ones only, or tells nothing
            search.add_like(signature, seconds)
        elif failed:
            search.fail(search.trial)
        else:
            search.add(search.trial._replace(micro_batch=n), seconds)
            if seconds is None:
                return
        self._planned.clear()

    def recall(self, n: int, signature: Signature) -> None:
        """Take the `n` that an earlier run has chosen with a clock, instead of the present one.

        The signature is of the batch that it was chosen for, and that has been planned again.
        """
        self._ways.search = self._search.anew((n, signature.elements), sends=self._search.sends)
        self._ways.unchunked = None
        self.earlier = None
        self._planned.pop(self._foreseen.plain(signature), None)

    def _say_stopped(self, signature: Signature) -> None:
        """Say why a batch is planned anew that was guessed to fit undivided, if it was stopped."""
        foreseen = self._foreseen.bound(signature) if signature.most else None
        guessed = foreseen is not None and foreseen.full_batch and foreseen.how == PEAKS
        if guessed and not self._varied:
            self._varied = True
            say(
                "a step that was foreseen to fit undivided was stopped at its budget: its memory "
                "depends on the values of a batch, so it is planned again by rows of this one"
            )

    def _decide(self, request: PlanningRequest) -> RunPlan:
        """Return how a batch is run: the first one by a plan that was passed in.

        A plan without lanes is none for a batch that is divided where its samples meet.
        """
        settled, signature = self._settled, request.signature
        if settled is not None:
            self._search.chosen = settled.micro_batch, signature.elements
        meet = settled and settled.lanes != signature.lanes
        if settled is None or (meet and settled.micro_batch < signature.size):
            # A forecast that is made anew would lack the bytes that a step has shown
            # (test_more_than_was_foreseen_makes_another_plan_at_once).
            return self._ways.decide(request, () if self._corrected else self.rungs)
        if settled.offload is not None:
            request.refuse_spread()
        self._ways.take(settled, trains=signature.trains)
        self._settled = None
        self._search.decided += 1
        return settled


def _may_vary(planned: RunPlan) -> bool:
    """Say whether the bytes of a plan may depend on values: its forecast is of real rows only."""
    return planned.memory.how.startswith((REAL, PEAKS))


def _say_more(held: str, planned: RunPlan, why: str) -> None:
    say(f"a step {held}, and {show_bytes(planned.memory.predicted)} were foreseen: {why}")
