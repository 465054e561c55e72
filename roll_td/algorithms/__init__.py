"""Functions of tensors, nothing else: no config, no process group, no model."""
