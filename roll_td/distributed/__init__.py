"""Ranks, their environment, and the groups they form."""
