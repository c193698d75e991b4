"""Members that hold the same stage add up their gradients before a step, and compare weights after it."""
