"""Micro-batches that a data node trains on, of rollouts or of text, and their loss at the end of a path."""
