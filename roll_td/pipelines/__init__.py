"""Pipelines: the driver's side of a job. `base` has what all share, the others are shipped."""
