"""The first exchange of a step over ranks, and the gain from putting it off."""
