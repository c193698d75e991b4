"""Finds the source of the answers: the node that runs in this home, or one of its checkpoints.

serve_command.py, chat_command.py -> [answering] -> answering_socket.py of the node, or one of our own
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import EngineError
from swarmnode.extensions.serve.answering_socket import AnsweringSocket, find_service
from swarmnode.node.building.node_process import read_running
from swarmnode.node.building.page_client import status_here
from swarmnode.node.commands.offline import as_trained, load_checkpoint, of_round
from swarmnode.settings.config_layers import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answering:
    """The source of answers."""

    find: Callable[[], str | None]
    """Returns the socket of the service, or None if there is none now."""
    about: str
    policy: str = "policy"
    """The name under which to ask for the wanted policy."""


def _check_no_pipeline(settings: Settings) -> None:
    """Raises EngineError while a pipeline member runs here: the whole model may not fit beside the member's
    stage."""
    status = status_here(settings.paths)
    if status is not None and status.pipeline.name:
        raise EngineError(
            f"a member of pipeline {status.pipeline.name} runs here and cannot answer: no machine holds the"
            " whole model",
            hint="ask again when the pipeline has ended; if the whole model fits beside the stage, load a"
            " checkpoint now with --run NAME (`swarmnode runs` lists them)",
        )


def node_is_meant(settings: Settings, model: str | None, run: str | None) -> bool:
    """Returns True if the node that runs here trains the model and the run that a command line names. None:
    the command line names none."""
    if model is None and run is None:
        return True
    if (status := status_here(settings.paths)) is None:
        return False
    # A node shows only the last part of a folder's path.
    named = (None, status.model) if model is None else (settings.model, Path(settings.model).name)
    return run in (None, status.run) and status.model in named


@contextmanager
def answering(
    settings: Settings, *, base: bool, best: bool, model: str | None, run: str | None, policy: int = 0
) -> Generator[Answering]:
    """Finds the node that runs in this home. If there is none, or `model` or `run` name another one, loads a
    checkpoint, or the base model with `base`. Raises SwarmnodeError."""
    state, is_meant = settings.paths.state, node_is_meant(settings, model, run)
    # All policies of a node share one service. A policy that does not run now has its own checkpoint.
    service = state.parents[1] if policy and read_running(settings.paths.running) else state
    if not base and not best and find_service(service) is not None and is_meant:
        from swarmnode.node.building.policies import label_of

        asked, of = (label_of(policy), f"{label_of(policy)} of ") if policy else ("policy", "")
        yield Answering(lambda: find_service(service), f"{of}the running node", asked)
        return
    if is_meant:
        _check_no_pipeline(settings)
    settings = as_trained(settings)
    from swarmnode.extensions.serve.answering_service import AnsweringService
    from swarmnode.node.building.callers import CallerSource
    from swarmnode.node.building.policies import label_of

    longest = settings.config.rollout.max_tokens
    with load_checkpoint(settings, base=base, best=best, purpose="serve") as (local, checkpoint):
        source = CallerSource(local.shared, [label_of(0)], local.renderer, longest, state)
        about = "the base model" if checkpoint is None else f"the checkpoint {of_round(checkpoint)}"
        with AnsweringService(source) as service, AnsweringSocket(service) as opened:
            yield Answering(lambda: opened.path, f"{settings.model}, {about}")
