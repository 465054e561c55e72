"""Roles: Workers that register a few methods each."""
