"""Whether others can reach this node, and by which way."""
