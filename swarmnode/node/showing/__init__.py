"""Showing a node's state: status, metrics, panels, monitors."""
