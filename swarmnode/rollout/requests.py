"""Which requests an engine accepts, and the line in which they wait. The same for every engine.

collector.py -> submit -> [requests] -> embedded.py | fallback.py | fake.py
"""

import math
from collections import deque
from collections.abc import Iterable

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import Output, PolicyUpdate, Request, SamplingParams

COLDEST = 1e-3
"""Dividing logits by less than this may overflow, and is greedy in all but name."""


class RequestQueue:
    """First come, first served. Ids are unique from `submit` until `close`."""

    def __init__(self, max_length: int, vocab: int) -> None:
        self._max_length = max_length
        self._vocab = vocab
        self._waiting: deque[Request] = deque()
        self._open: set[str] = set()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """How many wait or run."""
        return len(self._open)

    def submit(self, requests: Iterable[Request]) -> list[Request]:
        """Queue all of them, or none: raises EngineError for the first that is not acceptable."""
        accepted = list(requests)
        ids: set[str] = set()
        for request in accepted:
            if request.request_id in self._open or request.request_id in ids:
                raise EngineError(f"request {request.request_id} is already in flight", hint="use a new id")
            ids.add(request.request_id)
            self._check(request)
        self._open |= ids
        self._waiting.extend(accepted)
        return accepted

    def take(self, count: int) -> list[Request]:
        """The next requests, at most `count`."""
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def take_alike(self, count: int) -> list[Request]:
        """The next requests, at most `count`, while their prompts are as long as the first one's."""
        taken: list[Request] = []
        while self._waiting and len(taken) < count:
            if taken and len(self._waiting[0].prompt_ids) != len(taken[0].prompt_ids):
                break
            taken.append(self._waiting.popleft())
        return taken

    def withdraw(self, request_ids: Iterable[str] | None) -> list[Request]:
        """Remove these from the line (all when None); ids that do not wait are ignored."""
        chosen = None if request_ids is None else set(request_ids)
        leaving = [r for r in self._waiting if chosen is None or r.request_id in chosen]
        if leaving:
            gone = {request.request_id for request in leaving}
            self._waiting = deque(r for r in self._waiting if r.request_id not in gone)
            self._open -= gone
        return leaving

    def close(self, request_id: str) -> None:
        """The request has left the engine; its id may be used again."""
        self._open.discard(request_id)

    def refuse_update(self, update: PolicyUpdate) -> None:
        """Raise EngineError while anything is in flight: one completion must have one policy."""
        if self._open:
            raise EngineError(
                f"policy {update.version} came while {len(self._open)} requests are in flight",
                hint="abort them, or step until they have finished",
            )

    def _check(self, request: Request) -> None:
        name, prompt, sampling = request.request_id, request.prompt_ids, request.sampling
        _check_sampling(name, sampling)
        if not prompt:
            raise EngineError(
                f"request {name} has an empty prompt", hint="a model continues at least one token"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab:
            raise EngineError(f"request {name} has token ids outside 0..{self._vocab - 1}")
        if len(prompt) + sampling.max_tokens > self._max_length:
            raise EngineError(
                f"request {name} needs {len(prompt)} prompt tokens + {sampling.max_tokens} new ones, "
                f"this engine holds {self._max_length}",
                hint="shorten the prompt or lower max_tokens",
            )


def _check_sampling(name: str, sampling: SamplingParams) -> None:
    problem = None
    if sampling.max_tokens < 1:
        problem = f"max_tokens is {sampling.max_tokens}, not at least 1"
    elif not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        problem = f"temperature is {sampling.temperature}, not a number from 0 up"
    elif 0 < sampling.temperature < COLDEST:
        problem = f"temperature {sampling.temperature} is below {COLDEST}; 0 is greedy"
    elif not 0 < sampling.top_p <= 1:
        problem = f"top_p is {sampling.top_p}, not in (0, 1]"
    elif sampling.top_k < 0:
        problem = f"top_k is {sampling.top_k}, negative"
    elif sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
        problem = f"seed {sampling.seed} does not fit 64 bits"
    if problem is not None:
        raise EngineError(f"request {name}: {problem}")


def untouched(request: Request, policy_version: int) -> Output:
    """The output of a request that was aborted before its first token."""
    return Output(request.request_id, (), (), policy_version, "abort")
