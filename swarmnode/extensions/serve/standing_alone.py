"""Where the answers come from: the node that runs in this home, or a checkpoint of it.

serve_command.py, chat_command.py -> [answering] -> answering_socket.py of the node, or one of our own
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarmnode.extensions.serve.answering_socket import AnsweringSocket, find_service
from swarmnode.node.building.node_process import read_running
from swarmnode.node.building.page_client import ask_status
from swarmnode.node.commands.offline import as_trained, load_checkpoint, of_round
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.node.showing.screen import Screen
from swarmnode.settings.config_layers import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answering:
    """Whoever answers."""

    find: Callable[[], str | None]
    """Finds the socket of the service; None: there is none now."""
    about: str


def node_is_meant(settings: Settings, model: str | None, run: str | None) -> bool:
    """Returns True if the node that runs here trains the model and the run that a command line names; None:
    it names none."""
    if model is None and run is None:
        return True
    note = read_running(settings.paths.running)
    status = None if note is None else ask_status(note, settings.paths)
    if not isinstance(status, NodeStatus):
        return False
    # A node shows the name of a folder without the way to it.
    named = (None, status.model) if model is None else (settings.model, Path(settings.model).name)
    return run in (None, status.run) and status.model in named


@contextmanager
def answering(
    settings: Settings, *, base: bool, best: bool, model: str | None, run: str | None
) -> Generator[Answering]:
    """Finds the node that runs in this home; without one, or where `model` or `run` name another, loads a
    checkpoint, or the base model where `base` says so. Raises SwarmnodeError."""
    state = settings.paths.state
    if not base and not best and find_service(state) is not None and node_is_meant(settings, model, run):
        yield Answering(lambda: find_service(state), "the running node")
        return
    settings = as_trained(settings)
    with Screen() as screen:
        local, checkpoint = load_checkpoint(
            settings, base=base, best=best, progress=screen.progress, purpose="serve"
        )
    from swarmnode.extensions.serve.answering_service import AnsweringService
    from swarmnode.node.building.callers import CallerSource
    from swarmnode.node.building.policies import label_of

    longest = settings.config.rollout.max_tokens
    source = CallerSource(local.shared, [label_of(0)], local.renderer, longest, state)
    about = "the base model" if checkpoint is None else f"the checkpoint {of_round(checkpoint)}"
    try:
        with AnsweringService(source) as service, AnsweringSocket(service) as opened:
            yield Answering(lambda: opened.path, f"{settings.model}, {about}")
    finally:
        local.engine.close()
