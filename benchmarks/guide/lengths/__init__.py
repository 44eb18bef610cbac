"""Trainings on batches of many lengths, within a budget."""
