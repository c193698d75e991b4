"""Checkpoints and runs on disk."""
