"""Gives the stand-in to every Python that a program starts: `tests.devices.__main__` names us."""

from tests.devices import stand_in as stand_in
