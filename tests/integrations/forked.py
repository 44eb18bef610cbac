"""Two ranks that are forked: what they import is imported once.

    python -m tests.integrations.forked MODULE WORDS...

Each runs the module's `main` of the words, with the environment that torchrun gives. How torchrun
starts processes is no matter of the tests that use this; `tests/cli/test_guide_torchrun.py` and
`tests/cli/test_torchrun.py` are about that.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback

from tests.frozen import freeze

RANKS = 2


def port() -> str:
    """Return a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def main(name: str, *words: str) -> int:
    """Fork the ranks and wait for them; where one fails, end the other and return 1."""
    module = importlib.import_module(name)
    freeze()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port(),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        TORCHELASTIC_RUN_ID="forked",
    )
    ranks = set()
    for rank in range(RANKS):
        child = os.fork()
        if child:
            ranks.add(child)
            continue
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        try:
            module.main(*words)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed = False
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
