"""Decides: what a step would take on a machine of known speed, and what should live where. No torch."""
