"""The identity of a node: the key made at its first run, and its peer id, name and signatures."""
