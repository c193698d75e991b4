"""The node itself: what it does next, what it shows, and how it survives."""
