"""The language model a node trains: weights, adapters, attention and head, from disk to a forward pass."""
