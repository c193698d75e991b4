"""Drawing examples: the rounds of a node, levels, demonstrations, and digests of draws."""
