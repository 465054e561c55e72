"""Checkpoints of a run: whole or not counted, random states, copies elsewhere."""
