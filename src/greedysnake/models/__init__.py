"""Adapts models to blocks."""
