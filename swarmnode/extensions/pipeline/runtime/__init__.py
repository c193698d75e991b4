"""A member of a pipeline as a running node: what ties its parts together, from settings to checkpoints."""
