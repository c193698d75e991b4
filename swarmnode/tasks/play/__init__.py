"""Conversations with environments and tools, turn by turn."""
