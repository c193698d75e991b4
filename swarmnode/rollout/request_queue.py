"""The common part of all engines: the queue of requests, and the checks before it."""

import math
import sys
from bisect import insort
from collections.abc import Collection, Iterable, Sequence

from swarmnode.errors import EngineError, RequestRefused
from swarmnode.rollout.engine import BASE_VERSION, Output, Request, SamplingParams

AHEAD_OF_ALL = -sys.maxsize
"""Priority of requests that have already run and wait to continue."""

COLDEST = 1e-3
"""The lowest temperature that divides: a lower one may overflow, and is greedy in all but name."""


class RequestQueue:
    """A queue of requests: lowest priority number first, then first come. Ids are unique from `submit` until
    `close`."""

    def __init__(self, max_length: int, vocab: int) -> None:
        self._max_length = max_length
        self._vocab = vocab
        self._line: list[tuple[int, int, Request]] = []  # sorted: priority, arrival
        self._arrivals = 0
        self._open: set[str] = set()

    def __len__(self) -> int:
        """Returns the number of waiting requests."""
        return len(self._line)

    @property
    def in_flight(self) -> int:
        """Number of requests waiting or running."""
        return len(self._open)

    @property
    def waiting(self) -> list[Request]:
        """Waiting requests, in the order in which they will start."""
        return [request for _, _, request in self._line]

    def submit(self, requests: Iterable[Request], live_versions: Collection[int]) -> list[Request]:
        """Queues all requests, or none. Raises EngineError for the first that is not acceptable now, and
        RequestRefused for one that never will be."""
        accepted = list(requests)
        ids: set[str] = set()
        for request in accepted:
            if request.request_id in self._open or request.request_id in ids:
                raise EngineError(f"request {request.request_id} is already in flight", hint="use a new id")
            ids.add(request.request_id)
            self.check(request, live_versions)
        self._open |= ids
        for request in accepted:
            self._arrivals += 1
            entry = (request.priority, self._arrivals, request)
            insort(self._line, entry, key=lambda entry: entry[:2])
        return accepted

    def put_first(self, requests: Sequence[Request]) -> None:
        """Queues requests that have already run, and whose ids are still in use, before all others."""
        self._line[:0] = [(AHEAD_OF_ALL, place, request) for place, request in enumerate(requests)]

    def take(self, count: int) -> list[Request]:
        """Takes the next requests, at most `count`."""
        taken, self._line = self._line[:count], self._line[count:]
        return [request for _, _, request in taken]

    def withdraw(self, request_ids: Iterable[str] | None) -> list[Request]:
        """Removes these requests from the queue (None: all); ignores ids that do not wait."""
        chosen = None if request_ids is None else set(request_ids)
        leaving = [r for _, _, r in self._line if chosen is None or r.request_id in chosen]
        if leaving:
            gone = {request.request_id for request in leaving}
            self._line = [entry for entry in self._line if entry[2].request_id not in gone]
            self._open -= gone
        return leaving

    def close(self, request_id: str) -> None:
        """Frees the id of a request that left the engine."""
        self._open.discard(request_id)

    def check(self, request: Request, live_versions: Collection[int]) -> None:
        """Raises the error of `submit` for this request, except for its id."""
        name, prompt, sampling = request.request_id, request.prompt_ids, request.sampling
        _check_sampling(name, sampling)
        if not prompt:
            raise RequestRefused(
                f"request {name} has an empty prompt",
                hint="a prompt needs at least one token: does the tokenizer give any for the text?",
            )
        known = (*prompt, *request.sampled.token_ids)
        if not 0 <= min(known) <= max(known) < self._vocab:
            raise RequestRefused(
                f"request {name} has token ids outside 0..{self._vocab - 1}",
                hint="encode it with the tokenizer of this model",
            )
        if len(request.sampled) >= sampling.max_tokens:
            raise RequestRefused(
                f"request {name} already has its {sampling.max_tokens} tokens",
                hint="it is complete: use its tokens, or raise max_tokens",
            )
        if request.version not in (None, BASE_VERSION, *live_versions):
            raise EngineError(
                f"request {name} asks for policy {request.version}, which is not live",
                hint=f"live are {', '.join(map(str, sorted(live_versions)))}",
            )
        if len(prompt) + sampling.max_tokens > self._max_length:
            raise RequestRefused(
                f"request {name} needs {len(prompt)} prompt tokens + {sampling.max_tokens} new ones, "
                f"this engine holds {self._max_length}",
                hint="shorten the prompt, lower max_tokens, or raise --set rollout.max_prompt_tokens=...",
            )


def _check_sampling(name: str, sampling: SamplingParams) -> None:
    problem = None
    if sampling.max_tokens < 1:
        problem = f"max_tokens is {sampling.max_tokens}, must be at least 1"
    elif not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        problem = f"temperature is {sampling.temperature}, must be at least 0"
    elif 0 < sampling.temperature < COLDEST:
        problem = f"temperature {sampling.temperature} is below {COLDEST}; 0 is greedy"
    elif not 0 < sampling.top_p <= 1:
        problem = f"top_p is {sampling.top_p}, not in (0, 1]"
    elif sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
        problem = f"seed {sampling.seed} does not fit 64 bits"
    if problem is not None:
        raise RequestRefused(f"request {name}: {problem}", hint="check its SamplingParams")


def untouched(request: Request) -> Output:
    """Returns the output of a request aborted while it waits: the tokens that it came with."""
    return Output(request.request_id, request.sampled, "abort")


def not_finite(version: int) -> EngineError:
    """Returns the error for a policy that yields NaN. Its samples are worthless, so none are handed out."""
    return EngineError(
        f"policy {version} gives NaN probabilities; its running requests are dropped",
        hint="move the newest checkpoint away, restart, and lower the learning rate",
    )
