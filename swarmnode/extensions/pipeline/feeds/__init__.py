"""Micro-batches of rollouts or text that a data node trains on, and their loss at the end of a path."""
