"""Backends of models: training, log-probs and generation behind two interfaces."""
