"""Between members: messages, tensors as bytes, streams with bounds, and links that are slower than real."""
