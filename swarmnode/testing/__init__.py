"""Fakes for your own tests, and the attackers that a swarm is tried with.

your tests, ours, benchmarks -> [testing] -> everything else; nothing of a node imports it

Each fake keeps the whole contract of the thing it stands for; ours and yours run against the same ones. What
is imported here needs no torch.

>>> from swarmnode.testing import FakeLearner, FakeTask, MemoryNetwork
"""

from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.testing.fake_engine import FakeEngine
from swarmnode.testing.fake_learner import FakeLearner
from swarmnode.testing.fake_task import FakeTask

__all__ = ["FakeEngine", "FakeLearner", "FakeTask", "MemoryNetwork"]
