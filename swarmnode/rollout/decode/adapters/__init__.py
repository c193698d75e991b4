"""Adapters in the embedded engine, one or several in a batch."""
