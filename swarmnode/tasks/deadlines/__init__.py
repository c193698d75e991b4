"""Deadlines for work that cannot be interrupted."""
