"""A node's admission to a private swarm: the swarm's state, and a host around another one."""

from swarmnode.extensions.private_swarms.private_host import PrivateHost
from swarmnode.extensions.private_swarms.private_swarm import PrivateSwarm
from swarmnode.extensions.private_swarms.swarm_record import accept
from swarmnode.network.streams import StreamHost


class PrivateAdmission(PrivateSwarm):
    """An `Admission` based on the key in a home."""

    accept = staticmethod(accept)

    @property
    def founder(self) -> str:
        return self.record.founder

    @property
    def seeds(self) -> tuple[str, ...]:
        return self.record.seeds

    def host(self, inner: StreamHost) -> PrivateHost:
        return PrivateHost(inner, self)
