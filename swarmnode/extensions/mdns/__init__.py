"""Multicast DNS: peers of the same local network find each other without an address."""

from swarmnode.registry import Parts

PARTS: Parts = {"local_peers": {"mdns": "swarmnode.extensions.mdns.mdns:local_peers"}}
