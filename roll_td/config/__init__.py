"""Dataclasses of a run's settings and how they are read. Nothing here imports torch."""
