"""Losses as numerator over denominator: declared, in the table of torch's losses, or traced once.

This folder knows functions of tensors, and models as far as they compute a loss inside. It knows no
step, no micro-batch of another rank and no plan.

Read `base` (`Loss` and its forms), `functionals` (the denominators of torch's losses), `terms`
(from their results to a weighted sum), `function_trace` and `callable_loss` (a loss function traced
from outside), `replay` (the same in later steps), `model_trace` and `traced_model` (the same inside
a model), `model_loss` with `model_terms` (a model that returns its loss), `contrastive` (each
sample against all others), `chunked` (wide linear maps that a loss computes in chunks) with
`logits`, `row_functions`, `chunked_rows` and `row_gradients`, then `calls`, `state` and `holders`
(Python state that a loss has).
"""
