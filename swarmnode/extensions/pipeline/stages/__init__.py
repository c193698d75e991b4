"""A stage in memory: its layers, its micro-batches and what it has learned."""
