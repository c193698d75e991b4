"""Tracks the requests in the engine, and picks the mode of a policy change under them.

partial_rollouts.py -> [RequestsInFlight] -> OpenGroup.record
"""

from collections.abc import Iterator, Sequence

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import Engine, InFlight, Output, Request
from swarmnode.rollout.schedule.open_group import OpenGroup

MODES: tuple[InFlight, ...] = ("keep", "recompute")
"""Modes of an update, cheapest first."""


class RequestsInFlight:
    """The requests in the engine by name, with the group and place of each."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[OpenGroup, int, int]] = {}  # group, place, tokens minus steps so far
        self._steps = 0
        self._tokens_at_step_0 = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    @property
    def context(self) -> int:
        """Total number of tokens that all requests attend to, prompts included, if each step gave each of
        them a token: an engine in another process is ahead of this, and a full one makes some wait."""
        return self._tokens_at_step_0 + self._steps * len(self._places)

    def add(self, group: OpenGroup, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Records that the engine has taken these requests for these places of the group."""
        for place, request in zip(places, requests, strict=True):
            tokens = len(request.prompt_ids) + len(request.sampled) - self._steps
            self._places[request.request_id] = (group, place, tokens)
            self._tokens_at_step_0 += tokens

    def step_done(self) -> None:
        self._steps += 1

    def take(self, output: Output) -> tuple[OpenGroup, int]:
        """Records an output of the engine in its group. Returns the group and the place in it. Raises
        EngineError for a request that is not ours."""
        if output.request_id not in self._places:
            raise EngineError(
                f"the engine returned request {output.request_id}, which is not ours",
                hint="while partial rollouts run, no other caller may use their engine: park() them first",
            )
        group, place, tokens = self._places.pop(output.request_id)
        self._tokens_at_step_0 -= tokens
        group.record(place, output)
        return group, place


def cheapest_mode(engine: Engine) -> InFlight | None:
    """Returns the engine's cheapest mode of an update. None: the engine must be empty."""
    return next((mode for mode in MODES if mode in engine.capabilities.inflight), None)
