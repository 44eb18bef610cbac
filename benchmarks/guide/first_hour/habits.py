"""Calls that people write from habit, one a line: what comes of each.

It prints one JSON object a call: its name, the type and text of the error, and how many frames of
the package the printed error shows.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anybatch

PACKAGE = str(Path(anybatch.__file__).parent)
MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
X, Y = torch.randn(12, 8), torch.randint(3, (12,))
LOSS = nn.CrossEntropyLoss()


def engine(loss: Any = LOSS, **named: Any) -> Any:
    return anybatch.Engine(MODEL, loss, **({"micro_batch": 4} | named))


def of_three(model: Any, outputs: Any, targets: Any) -> Any:
    return LOSS(outputs, targets) * model


def number(outputs: Any, targets: Any) -> float:
    return float(LOSS(outputs, targets))


def budget(memory: Any) -> Any:
    return anybatch.Engine(MODEL, LOSS, memory=memory)


CALLS: dict[str, Callable[[], Any]] = {
    'memory="6GB"': lambda: budget("6GB"),
    'memory="80%"': lambda: budget("80%"),
    "memory=6e9": lambda: budget(6e9),
    "Engine(model, loss, optimizer)": lambda: anybatch.Engine(
        MODEL, LOSS, torch.optim.SGD(MODEL.parameters(), 0.1)
    ),
    "dict(engine.last)": lambda: (it := engine()).backward(X, Y) and dict(it.last),
    'memory="6G"': lambda: budget("6G"),
    'micro_batch="auto"': lambda: engine(micro_batch="auto"),
    "engine(x, y)": lambda: engine()(X, Y),
    "engine.step()": lambda: engine().step(),
    "engine.train()": lambda: engine().train(),
    "engine.backward(loss)": lambda: engine().backward(LOSS(MODEL(X), Y)),
    "engine.backward((x, y))": lambda: engine().backward((X, Y)),
    "engine.backward(batch), a mapping": lambda: engine().backward({"x": X, "y": Y}),
    "engine.backward(x)": lambda: engine().backward(X),
    "engine.backward(x.numpy(), y)": lambda: engine().backward(X.numpy(), Y),
    "targets of another length": lambda: engine().backward(X, Y[:9]),
    "a loss of (model, outputs, targets)": lambda: engine(of_three).backward(X, Y),
    "a loss of each sample": lambda: engine(nn.CrossEntropyLoss(reduction="none")).backward(X, Y),
    "a loss that is a number": lambda: engine(number).backward(X, Y),
    "no loss": lambda: anybatch.Engine(MODEL, micro_batch=4).backward(X, Y),
    "check(model, loss, (x,))": lambda: anybatch.check(MODEL, LOSS, (X,)),
}


def frames(error: BaseException) -> int:
    """Return the frames of the package in a printed error."""
    shown = [one for one in (error, error.__cause__) if one is not None]
    every = [frame for one in shown for frame in traceback.extract_tb(one.__traceback__)]
    return sum(frame.filename.startswith(PACKAGE) for frame in every)


def main() -> None:
    for name, call in CALLS.items():
        found: dict[str, Any] = {"call": name, "error": "", "text": "", "frames": 0}
        try:
            call()
        except Exception as error:
            found |= {"error": type(error).__name__, "text": str(error), "frames": frames(error)}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
