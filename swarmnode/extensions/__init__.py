"""What the heart does without: each folder registers itself, and nothing outside of it imports it."""
