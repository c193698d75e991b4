"""Private swarms: the key of a swarm, its record, and sealed streams between its members."""
