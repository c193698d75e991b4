"""One round of sampling: examples in, whole groups of completions out, each as soon as it is complete.

tasks -> examples -> [collector] -> engine
                          |
                          v  Answered -> scoring (overlaps with the sampling of the rest)

Blocking code: the node runs it in a worker thread.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import Engine, Output, Request, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.types import Completion, Example, ExampleKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answered:
    """An example with all its completions, not scored yet."""

    example: Example
    completions: tuple[Completion, ...]


def collect(
    engine: Engine,
    renderer: Renderer,
    examples: Sequence[Example],
    group_size: int,
    sampling: SamplingParams,
    *,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[Answered, None, None]:
    """Sample `group_size` completions of each example; yield each group when its last one has finished.

    When `should_stop` says so, or the caller closes the iterator, the unfinished is aborted and not yielded.
    An example that the engine refuses (too long a prompt) is logged and left out. `sampling.seed` is replaced
    by one per completion, made from `seed`, which stands for this node and round: a round can be repeated.
    """
    pending: dict[str, _Group] = {}
    for example in examples:
        group = _Group(example, group_size)
        if group.submit(engine, renderer.prompt_ids(example.prompt), sampling, seed):
            pending.update(dict.fromkeys(group.places, group))
    # Even with a single slot, each step of a working engine brings at least one token.
    steps_left = len(pending) * sampling.max_tokens
    try:
        while pending and not should_stop():
            if steps_left == 0:
                raise EngineError(
                    f"{len(pending)} requests never finished", hint="this is a bug of the engine"
                )
            steps_left -= 1
            for output in engine.step():
                group = pending.pop(output.request_id)
                group.add(output, renderer)
                if (completions := group.completions()) is not None:
                    yield Answered(group.example, completions)
    finally:
        if pending:
            engine.abort(list(pending))


class _Group:
    """An example that is being answered."""

    def __init__(self, example: Example, size: int) -> None:
        self.example = example
        self.places: dict[str, int] = {_request_id(example.key, place): place for place in range(size)}
        """Request id -> place within the group."""
        self._completions: list[Completion | None] = [None] * size

    def submit(
        self, engine: Engine, prompt_ids: tuple[int, ...], sampling: SamplingParams, seed: int
    ) -> bool:
        """Queue the requests. False when the engine does not take them."""
        key = self.example.key
        try:
            engine.submit(
                Request(request_id, prompt_ids, replace(sampling, seed=completion_seed(seed, key, place)))
                for request_id, place in self.places.items()
            )
        except EngineError as error:
            log.warning("leaving out example %d of %s: %s", key.index, key.task, error)
            return False
        return True

    def add(self, output: Output, renderer: Renderer) -> None:
        self._completions[self.places[output.request_id]] = Completion(
            text=renderer.decode(output.token_ids),
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            policy_version=output.policy_version,
            finish=output.finish,
        )

    def completions(self) -> tuple[Completion, ...] | None:
        """All of them, in order; None while one is missing."""
        found = tuple(completion for completion in self._completions if completion is not None)
        return found if len(found) == len(self._completions) else None


def completion_seed(seed: int, key: ExampleKey, place: int) -> int:
    """The sampling seed of completion `place` of an example: the same in every run."""
    name = json.dumps([seed, key.task, key.version, key.seed, key.index, place])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _request_id(key: ExampleKey, place: int) -> str:
    return f"{key.task}/{key.version}/{key.seed}/{key.index}/{place}"
