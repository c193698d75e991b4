"""The state that the parts of an exchange share: our identity, our settings, and what we know of others.

Exchange -> [ExchangeContext] -> Publisher (what goes out), Inbox (what is heard), Fetcher (what is fetched)
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarmnode.errors import NetworkError
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.exchange.messages import Arrival
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import Trust
from swarmnode.exchange.peers.swarm_health import SwarmHealth
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Host
from swarmnode.tasks.task import Task


@dataclass(slots=True)
class ExchangeContext:
    """The shared state of one exchange. `collect` and `resume` set the policy version; all else stays as it
    is."""

    host: Host
    key: NodeKey
    tasks: Mapping[str, Task]
    settings: ExchangeSettings
    ledger: Ledger
    clock: Callable[[], float]
    rng: random.Random
    neighbourhood: Neighbourhood
    """Exchanges of the other policies in this process."""
    policy_version: int = 0
    """Version of our own policy, from which the age of groups is counted."""
    health: SwarmHealth = field(init=False)

    def __post_init__(self) -> None:
        self.health = SwarmHealth(self.settings.swarm, self.clock)

    def arrive(self) -> Arrival:
        """Returns the time and policy version of anything that comes in now."""
        return Arrival(self.clock(), self.policy_version)

    def trust_of(self, author: str) -> Trust:
        """Returns the trust that an author has earned; policies of this process need not earn any."""
        return "neighbour" if author in self.neighbourhood else self.ledger.reputation.trust_of(author)

    def is_known(self, author: str) -> bool:
        """Returns True if enough groups of an author were accepted, or if it is a policy of this process."""
        return self.trust_of(author) != "newcomer"

    def is_banned(self, peer: str) -> bool:
        return self.ledger.reputation.is_banned(peer, self.clock())

    def has_neighbours(self) -> bool:
        return self.neighbourhood.has_others(self.key.peer_id)

    async def is_anybody_there(self) -> bool:
        """Returns True if somebody could hear us: a policy of this process, or a connected peer."""
        try:
            return self.has_neighbours() or bool(await self.host.peers())
        except NetworkError:
            return False
