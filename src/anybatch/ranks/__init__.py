"""The batch over several processes: what they tell each other in a step."""
