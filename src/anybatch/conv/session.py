"""Choice of an engine's convolutions: torch, a workspace of its own, or a plan's kernels."""

from __future__ import annotations

from typing import Any

import torch

from anybatch.conv.convolutions import chooser_of, kernel_devices
from anybatch.conv.engaged import Engaged, obeying
from anybatch.core.plan import Plan
from anybatch.core.units import parse_bytes
from anybatch.errors import NotYetError


def engaged(device: torch.device, workspace: Any, plan: Plan | None) -> Engaged:
    """Return the `Engaged` that computes an engine's convolutions.

    Args:
        device: where its model is.
        workspace: the argument; None is the context that the user has entered, or torch.
        plan: the plan that is obeyed, if there is one.

    Raises:
        ValueError: `workspace` means nothing.
        NotYetError: convolutions are always torch's on its device.
    """
    if plan is not None and plan.convolutions is not None:
        return Engaged(device.type, obeying(plan.convolutions))
    if workspace is None:
        return Engaged(device.type)
    workspace_bytes = parse_bytes(workspace, "workspace")
    if device.type not in kernel_devices():
        raise NotYetError(
            f"convolutions are divided on {' and '.join(kernel_devices())} here, and the model is "
            f"on {device}: leave workspace out"
        )
    return Engaged(device.type, chooser_of(workspace_bytes))
