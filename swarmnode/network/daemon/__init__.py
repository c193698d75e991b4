"""The libp2p stack that a node runs: the p2pd process, its control protocol, and its supervision."""
