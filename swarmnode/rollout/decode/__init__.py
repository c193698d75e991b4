"""Our own engines: a continuous decode loop, the model's own `generate`, and the weights of both."""
