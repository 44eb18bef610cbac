"""A coupled loss, computed once on the outputs of the full batch.

Dice loss, InfoNCE, or any function not recognised as a sum over samples needs all outputs at once;
outputs are small, saved tensors are not. So the outputs are computed first, without graphs; the
loss is computed on all of them; and a second pass runs the backward of each micro-batch from its
rows of the gradient of the loss. It is exact for every loss, and costs one more forward of all
micro-batches but the last, whose graph still exists when the loss has been computed.

    pass 1:  forward mu_0, mu_1, mu_2           outputs kept; a graph of mu_2 only
             loss(all outputs), backward        d loss / d outputs;  backward of mu_2
    pass 2:  forward mu_0, backward(its rows);  mu_1                 the same samples and draws

Encoders that do not meet before the loss are run in parts (`anybatch.execution.parts`): the graph
of the last micro-batch is that of its last part, and pass 2 runs the others.

Source: the chain rule; as gradient caching, Gao et al. 2021, section 3.
"""

from __future__ import annotations

from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import MicroBatch
from anybatch.core.rng import RNGState
from anybatch.execution.first_pass import FirstPass
from anybatch.execution.loss_gradients import loss_of_all, value_of_all
from anybatch.execution.second_pass import Backwards
from anybatch.execution.step import Step, check_trains

COUPLED = "coupled"
"""Name of such a loss in a plan."""


def gather(step: Step) -> Tensor:
    """Run the step in two passes; in one, where there are no gradients to take.

    Args:
        step: the mini-batch and the model; see `anybatch.execution.step`.

    Returns:
        The loss of the full batch, a detached 0-dim tensor.

    Raises:
        NotReproducibleError: the second pass had other samples or other outputs.
        LossError: the loss uses tensors that it was not given.
    """
    step.found = COUPLED
    start = RNGState.now()
    first = FirstPass(step)
    first.run()
    if first.in_laps and step.buffers.strays():  # they have been set back
        step.begin_again()
        first = FirstPass(step, all_parts=True)
        first.run()
    rows = step.global_batch.rows(first.outputs, first.targets, step.layout or (), step.batch.size)
    first.keep_own_rows(rows)
    step.agree()  # a rank without samples has drawn nothing, and takes the same loss
    if step.gradients is None or not step.batch.size:
        loss = value_of_all(step, rows)
    else:
        computed = loss_of_all(step, rows)
        loss, end, statistics = computed.loss, RNGState.now(), step.buffers.statistics()
        backwards = Backwards(step, first, computed, end)
        del computed
        backwards.last()
        step.buffers.restart()
        if backwards.left:
            step.put_back(start)
            backwards.second_pass()
        if first.in_laps:
            step.buffers.refuse_strays()
        step.buffers.write_final()  # the last forward may be of pass 1, or of some parts only
        check_trains(backwards.trained)
        if step.draws is None:
            step.put_back(end)
        step.buffers.settle(statistics)
    _show_all(step, first)
    step.finish()
    return loss


def _show_all(step: Step, first: FirstPass) -> None:
    if step.observe is None:
        step.done += len(first.flat)
        return
    begin = 0
    for size in first.flat:
        targets = tree.rows(first.targets, begin, begin + size, step.batch.size)
        outputs = step.rows(first.outputs, begin, size, step.batch.size)
        step.show(outputs, MicroBatch(None, targets, size))
        begin += size
