"""A stage in memory: its layers, its micro-batches and its learned state."""
