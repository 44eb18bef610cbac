"""Real faults of real files: a step is right, or it says that it is not, and the next one is right.

The system itself refuses: a limit on the size of files, a device that is always full, a file that
is cut short, a folder that is gone, a bit that is turned over, a signal.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.busy import busy
from tests.offloads import small_leave
from tests.unit.offloading.steps import bounds, equal, mlp, plain, states
from torch import nn

import anybatch
from anybatch.errors import StoreError
from anybatch.reports import Offload

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="no /proc: a file without a name cannot be reached"
)
EARLIER_STEPS = pytest.mark.parametrize(
    "before", [0, 1, 2], ids=["recorded", "planned", "once more"]
)
"""Steps that go well before the one with the fault."""

NO_FOLDER = "its store could not be (opened|written to) .*No such file"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)


EARLIER: set[str] = set()
"""Spill files that other tests of this process have left open, as those that run pages do."""


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    threads = busy()
    EARLIER.clear()
    EARLIER.update(path for _, path in open_files())
    yield
    gc.collect()
    assert busy() == threads
    assert spill_files() == []
    assert list(tmp_path.iterdir()) == []


def open_files() -> Iterator[tuple[int, str]]:
    """The descriptors and paths of the spill files that this process has open."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            path = str(link.readlink())
        except OSError:  # the descriptor that lists them
            continue
        if "anybatch-" in path:
            yield int(link.name), path


def spill_files() -> list[int]:
    """The descriptors of those that a test here has opened."""
    return [descriptor for descriptor, path in open_files() if path not in EARLIER]


def nothing() -> None:
    """Come between and do no harm."""


class Step:
    """A step that may be come between: when something has left, and before backward."""

    def __init__(self) -> None:
        model, self.x = mlp(depth=6)
        assert isinstance(model, nn.Sequential)
        self.model = model
        self.wanted = plain(model, self._run, 1)[0]
        low, high = bounds(model, self._run)
        self.budgets = low, (low + high) // 2
        gc.collect()  # with the files of these

    def gradients(
        self, off: Offload, early: Callable[[], Any] = nothing, late: Callable[[], Any] = nothing
    ) -> bool:
        """Run it, and say whether the gradients are those of a step in memory."""
        self.model.zero_grad()
        with off:
            self._run(self.model, early, late)
        return equal(states(self.model), self.wanted)

    def fails(
        self,
        off: Offload,
        match: str,
        early: Callable[[], Any] = nothing,
        late: Callable[[], Any] = nothing,
    ) -> bool:
        """Say whether a step has failed, in these words; if it has not, it is right."""
        try:
            assert self.gradients(off, early, late)
        except StoreError as error:
            message = str(error)
        else:
            return False
        assert re.search(match, message)
        return True

    def _run(
        self,
        ours: nn.Module,
        early: Callable[[], Any] = nothing,
        late: Callable[[], Any] = nothing,
    ) -> None:
        assert isinstance(ours, nn.Sequential)
        first = ours[:2](self.x)
        early()
        loss = ours[2:](first).sum()
        late()
        loss.backward()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Have the system refuse larger files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@EARLIER_STEPS
def test_a_file_that_may_not_grow(tmp_path: Path, before: int) -> None:
    step, failed = Step(), 0
    for budget in step.budgets:
        for size in (0, 4096, 12_000, 1 << 20):
            off = anybatch.offload(memory=budget, store=tmp_path, device="cpu", recompute=False)
            assert all(step.gradients(off) for _ in range(before))
            with files_up_to(size):
                failed += step.fails(off, "could not be (written to|opened) .*: free space there")
            assert step.gradients(off)
            off.close()
    assert failed >= 3


@EARLIER_STEPS
def test_a_device_that_is_full(tmp_path: Path, before: int) -> None:
    def fill() -> None:
        (file,) = spill_files()
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, file, inheritable=False)
        os.close(full)

    step, failed = Step(), 0
    for budget in step.budgets:
        off = anybatch.offload(
            memory=budget, store=tmp_path, device="cpu", recompute=False, check=True
        )
        assert all(step.gradients(off) for _ in range(before))
        if before:
            fill()
        match = "No space left on device|have changed in the spill file"  # it reads as zeros
        failed += step.fails(off, match, nothing if before else fill)
        assert step.gradients(off)
        off.close()
    assert failed == 2


@EARLIER_STEPS
def test_a_file_that_is_cut_short(tmp_path: Path, before: int) -> None:
    step, failed = Step(), 0
    for budget in step.budgets:
        for size in (0, 5000, 8192):

            def cut(size: int = size) -> None:
                os.truncate(f"/proc/self/fd/{spill_files()[0]}", size)

            off = anybatch.offload(
                memory=budget, store=tmp_path, device="cpu", recompute=False, check=True
            )
            assert all(step.gradients(off) for _ in range(before))
            match = r"the spill file ends at \d+ of \d+ bytes|have changed in the spill file"
            failed += step.fails(off, match, late=cut)
            assert step.gradients(off)
            off.close()
    assert failed >= 3


def flip_bit(at: int) -> None:
    """Turn one bit of the spill file over, as another program would."""
    other = os.open(f"/proc/self/fd/{spill_files()[0]}", os.O_RDWR)
    byte = os.pread(other, 1, at)
    os.pwrite(other, bytes([byte[0] ^ 4]), at)
    os.close(other)


PLACES = tuple(4096 * block + 1033 for block in (2, 3, 5))
"""In tensors that nobody else holds: every one is of two blocks, and the first is `first`."""


@EARLIER_STEPS
def test_a_bit_that_is_turned_over_is_found_by_checksums(tmp_path: Path, before: int) -> None:
    step, failed = Step(), 0
    for at in PLACES:
        off = anybatch.offload(
            memory=step.budgets[0], store=tmp_path, device="cpu", recompute=False, check=True
        )
        assert all(step.gradients(off) for _ in range(before))
        match = "have changed in the spill file"
        failed += step.fails(off, match, late=partial(flip_bit, at))
        assert step.gradients(off)
        off.close()
    assert failed == len(PLACES) or (failed and before)  # a plan may have it back before


def test_nothing_but_checksums_finds_it(tmp_path: Path) -> None:
    step = Step()
    for at in PLACES:
        off = anybatch.offload(
            memory=step.budgets[0], store=tmp_path, device="cpu", recompute=False
        )
        assert not step.gradients(off, late=partial(flip_bit, at))
        assert step.gradients(off)
        off.close()


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    step, folder = Step(), tmp_path / "spill"
    folder.mkdir()
    off = anybatch.offload(memory=step.budgets[1], store=folder, device="cpu", recompute=False)
    folder.rmdir()
    for _ in range(2):
        with pytest.raises(StoreError, match=NO_FOLDER):
            step.gradients(off)
    folder.mkdir()
    assert step.gradients(off)
    folder.rmdir()  # what is in use has no name there
    assert step.gradients(off)
    off.close()
    with pytest.raises(StoreError, match=NO_FOLDER):
        step.gradients(off)
    folder.mkdir()
    assert step.gradients(off)
    off.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_ctrl_c_while_the_file_is_written_and_read(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, real, stopped = Step(), getattr(os, call), 0
    main = threading.main_thread().ident
    assert main is not None
    left = [0]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            signal.pthread_kill(main, signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(os, call, interrupted)
    for before in (0, 1, 2):
        for at in (1, 2, 4):
            off = anybatch.offload(
                memory=step.budgets[1], store=tmp_path, device="cpu", recompute=False
            )
            left[0] = 0
            assert all(step.gradients(off) for _ in range(before))
            try:
                left[0] = at
                assert step.gradients(off)
            except KeyboardInterrupt:
                stopped += 1
            left[0] = 0
            assert step.gradients(off)
            off.close()
    assert stopped >= 5


def test_what_a_step_before_has_saved_says_that_it_is_gone(tmp_path: Path) -> None:
    """A fault takes the file with it; a loss of that step has no backward any more."""
    step = Step()
    off = anybatch.offload(memory=step.budgets[0], store=tmp_path, device="cpu", recompute=False)
    with off:
        loss = step.model(step.x).sum()
    with files_up_to(0):
        assert step.fails(off, "could not be (written to|opened)")
    step.model.zero_grad()
    with pytest.raises(StoreError, match="run forward again"):
        loss.backward()
    assert all(p.grad is None or not torch.any(p.grad) for p in step.model[-2].parameters())
    off.close()
