"""Reachability of this node for others, and by which way."""
