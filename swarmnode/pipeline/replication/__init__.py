"""What members average, keep for each other, and write to disk."""
