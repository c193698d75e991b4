"""A member as a running node: its process from settings to checkpoints, and its role as a data node."""
