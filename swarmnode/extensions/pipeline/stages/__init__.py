"""A stage in memory: its layers, its micro-batches, its learned state, and the data that it is trained on."""
