"""Everything anybatch refuses, as one family: catch `AnybatchError` to catch them all."""

from __future__ import annotations


class AnybatchError(Exception):
    """The base of every error that anybatch raises on purpose."""


class BatchError(AnybatchError, ValueError):
    """The batch cannot be split: leaves of different sizes, no tensor, no sample."""


class LossError(AnybatchError, ValueError):
    """The loss is not declared where it must be, or does not do what was declared."""


class NotExactError(AnybatchError, RuntimeError):
    """The gradient of the whole batch cannot be had this way, so no step was made."""


class NotReproducibleError(NotExactError):
    """A second pass met other samples or other random draws than the first."""


class NotYetError(AnybatchError, NotImplementedError):
    """The place for a feature is here; the feature is not."""
