"""Trying a task before it is trained on: checks, probes, rehearsals."""
