"""Who a node is: an Ed25519 key, the name people read, and bytes signed with it."""
