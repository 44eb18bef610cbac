"""anybatch inside other packages' networks and loops, as these packages are: one folder a host.

The packages are not among this project's. `make hosts` installs those of `requirements.txt` in an
environment of their own, runs `tests/hosts` there, and then each `run.py` below this folder. What
is not installed is left out by name.
"""
