"""Peers and bytes: one Protocol (host.py), a fake (in_memory.py) and the go-libp2p daemon (p2pd.py)."""
