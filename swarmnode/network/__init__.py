"""Peers and bytes: a Protocol (host.py), a fake (memory_network.py), the go-libp2p daemon (p2pd_host.py)."""
