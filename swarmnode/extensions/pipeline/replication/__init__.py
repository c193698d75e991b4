"""The replicas of a stage: they add up their gradients, and compare their weights after the step."""
