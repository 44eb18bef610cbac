"""Gives the stand-in to every Python that a program starts: `tests.devices.__main__` names us."""

import tests.devices.stand_in  # noqa: F401
