"""A stage in memory: layers, what passes them, what they have learnt, and what is learned from."""
