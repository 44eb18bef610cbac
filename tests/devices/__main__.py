"""Run a program on the stand-in: ``python -m tests.devices -m module ...``, or a file."""

import runpy
import sys

from tests.devices import stand_in

if stand_in.MISSING:
    sys.exit(stand_in.MISSING)
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
