"""Assembling a node from its settings."""
