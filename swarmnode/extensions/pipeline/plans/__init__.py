"""From what members announce to the plan that all of them agree on, and what is done where it breaks."""
