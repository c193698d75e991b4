"""The identity of a node: an Ed25519 key, the name that people read, and bytes signed with it."""
