"""Losses as numerator over denominator: declared, in the table of torch's losses, or traced once.

This folder knows functions of tensors, and models as far as they compute a loss inside. It knows no
step, no micro-batch of another rank and no plan.

Read `declared` (`Loss` and its forms), `functionals` (denominators of torch's losses), `watch` (a
loss function traced from outside), `tracing` and `traced` (the same inside a model), `model_loss`
(a model that returns its loss), `contrastive` and `tiles` (every sample against all others).
"""
