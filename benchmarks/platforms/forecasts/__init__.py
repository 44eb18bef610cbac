"""Forecasts beside what steps hold on a GPU; `make gpu-check` writes it."""
