"""Attackers: processes with daemons of their own that do to a node what a stranger could.

tests/hostile, benchmarks/attacks.py -> [attackers] -> the victim's daemon

daemon.py is an identity, wire.py the bytes, poison.py what is announced, attacks.py the attacks by name, and
`handle.py` what whoever starts them holds. Only loopback addresses are accepted.
"""
