"""Peers and bytes: a Protocol (host.py), its fake (memory_network.py) and the go-libp2p daemon (p2pd_host.py)."""
