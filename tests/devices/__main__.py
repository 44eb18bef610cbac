"""Run a program on the stand-in, and all that it starts: ``python -m tests.devices -m module ...``.

Or a file in place of ``-m module``.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

from tests.devices import stand_in

if stand_in.MISSING:
    sys.exit(stand_in.MISSING)
del sys.argv[0]
here = Path(__file__).parent
others = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
os.environ["PYTHONPATH"] = os.pathsep.join([str(here / "site"), str(here.parents[1]), *others])
code: object = 0
try:
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    code = ended.code
except BaseException:
    traceback.print_exc()
    code = 1
if not isinstance(code, int | None):
    sys.stderr.write(f"{code}\n")
    code = 1
sys.stdout.flush()
sys.stderr.flush()
# Autograd's thread may still let go of a graph, and aborts where Python is gone (torch 2.13).
os._exit(int(code or 0))
