"""Callers that use the engine of a policy for people, beside the rounds of the node.

members.py, and extensions/serve/ where no node runs -> [open_callers] -> registry.py -> extensions/serve/
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from swarmnode.machine.storage import Paths
from swarmnode.node.building.local_policy import LocalPolicy
from swarmnode.registry import find, names
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.shared_engine import SharedEngine
from swarmnode.settings.config import Config


@dataclass(frozen=True, slots=True)
class CallerSource:
    """An engine as its callers see it."""

    shared: SharedEngine
    policies: Sequence[str]
    """The names of its policies, as `SharedEngine.guest` takes them."""
    renderer: Renderer
    max_tokens: int
    """Default length limit of an answer, in tokens."""
    state: Path
    """The folder for notes to other commands in this home."""


def open_callers(
    stack: ExitStack, local: LocalPolicy, policies: Sequence[str], config: Config, paths: Paths
) -> None:
    """Opens the engine to every registered kind of caller until the stack is closed."""
    source = CallerSource(local.shared, policies, local.renderer, config.rollout.max_tokens, paths.state)
    for name in names("caller"):
        stack.enter_context(find("caller", name)(source))
