"""Scheduling of generation: which prompts, to which engine, how far ahead of training."""
