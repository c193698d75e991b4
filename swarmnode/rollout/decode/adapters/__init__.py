"""Adapters in the embedded engine: one or several per batch."""
