"""The seconds of a whole run, foreseen and taken."""
