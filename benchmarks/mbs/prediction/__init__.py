"""The memory that is foreseen, against what a step then holds."""
