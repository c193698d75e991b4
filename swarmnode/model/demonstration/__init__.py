"""The small policies that the project builds itself."""
