"""Who can reach a node: its peers try, and what they find is told with advice."""

from swarmnode.registry import Parts

PARTS: Parts = {"reach": {"dialback": "swarmnode.extensions.reach.reachability:Reachability"}}
