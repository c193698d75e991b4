"""A member at work: its thread, the way of micro-batches, and the end of an iteration."""
