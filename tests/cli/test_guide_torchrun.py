"""The lines of the page on ranks under a real torchrun: two processes, one batch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "ranks.md"
BEFORE = """
import sys, torch, anybatch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).double()
x, y = torch.randn(20, 8).double(), torch.randint(3, (20,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOADER = """
mine = slice(0, 13) if torch.distributed.get_rank() == 0 else slice(13, 20)
loader = [(x[mine], y[mine])] * 3
engine"""
AFTER = """
if torch.distributed.get_rank() == 1:
    import json
    found = [loss.item(), *(float(p.detach().sum()) for p in model.parameters())]
    open(sys.argv[1], "w").write(json.dumps(found))
torch.distributed.destroy_process_group()
"""


def test_the_lines_of_the_guide_train_on_the_batch_of_all_ranks(tmp_path: Path) -> None:
    lines = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    (shown,) = (one for one in lines if "init_process_group" in one)
    script, out = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(BEFORE + shown.replace("engine", LOADER, 1) + AFTER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(out)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).double()
    x, y = torch.randn(20, 8).double(), torch.randint(3, (20,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    want = [loss.item(), *(float(p.detach().sum()) for p in model.parameters())]
    assert all(abs(a - b) < 1e-12 for a, b in zip(found, want, strict=True))
