"""The memory and the time of a step, for every way there is to hold less."""
