"""Members that hold the same stage: they add up gradients before a step, and compare weights after it."""
