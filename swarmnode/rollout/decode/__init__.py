"""Our own engine: a continuous decode loop, and the weights that it reads."""
