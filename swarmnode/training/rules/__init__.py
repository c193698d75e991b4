"""What a node learns from the rollouts of strangers: rules by name, what they keep, what is cut off."""
