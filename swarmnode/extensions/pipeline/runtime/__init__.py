"""A member as a running node: its process from settings to checkpoints, and whether it holds the data."""
