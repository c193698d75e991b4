"""An engine that gives scripted answers, for tests of everything above the engine. No torch.

schedule/partial_rollouts.py -> submit -> [fake] -> Output

It keeps the whole contract: a token per step, slots, priorities, stop and length, versions and spans, all
modes of an update, abort and resume. It has no keys and values, so "recompute" differs from "keep" only in
what it counts and in how it labels spans.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import (
    BASE_VERSION,
    Capabilities,
    EngineStats,
    InFlight,
    Output,
    PolicyUpdate,
    Request,
    Sampled,
)
from swarmnode.rollout.engine_counters import EngineCounters
from swarmnode.rollout.request_queue import RequestQueue, untouched
from swarmnode.types import FinishReason, Span

LOGPROB = -0.5
"""Log-probability of every token of a fake engine, unless it is made with another."""


Answer = Callable[[Request], Sequence[int]]
"""Function of a request that gives its whole completion, including the tokens it was resumed with."""
Logprob = Callable[[Request, int, int], float]
"""Function of a request, a place in its completion and the token there, that gives its log-probability."""


@dataclass(slots=True)
class _Running:
    request: Request
    answer: tuple[int, ...]
    """Whole completion, including the tokens it was resumed with."""
    version: int
    logprob: Logprob
    stale: bool = False
    tokens: list[int] = field(default_factory=list[int])
    """Tokens since it started or was resumed."""
    spans: list[Span] = field(default_factory=list[Span])

    @property
    def done(self) -> int:
        return len(self.request.sampled) + len(self.tokens)

    def advance(self) -> None:
        self.spans.append(Span(self.version, self.done, self.done + 1, "stale" if self.stale else "fresh"))
        self.tokens.append(self.answer[self.done])

    def finish(self) -> FinishReason | None:
        if self.done == len(self.answer):
            return "stop"
        return "length" if self.done == self.request.sampling.max_tokens else None

    def sampled(self) -> Sampled:
        places = enumerate(self.tokens, len(self.request.sampled))
        logprobs = [self.logprob(self.request, place, token) for place, token in places]
        return self.request.sampled.extended(self.tokens, logprobs, self.spans)


def by_turns(say: Callable[[Request, Sequence[tuple[int, ...]]], Sequence[int]]) -> Answer:
    """Returns the answers of a policy that talks with an environment: `say` gives the tokens of one turn, EOS
    included, from its request and the inserted tokens between the earlier turns."""

    def answer(request: Request) -> Sequence[int]:
        sampled = request.sampled
        given = [sampled.token_ids[start:end] for start, end in sampled.given]
        return (*sampled.token_ids[: sampled.turn_start], *say(request, given))

    return answer


class FakeEngine:
    """Answers each request with `answer(request)`: the tokens a policy would sample, its EOS token included.

    >>> from swarmnode.rollout.engine import SamplingParams
    >>> engine = FakeEngine(lambda request: (*request.prompt_ids, 0))
    >>> engine.submit([Request("a", (7,), SamplingParams(max_tokens=4))])
    >>> [list(engine.step()), [output.token_ids for output in engine.step()]]
    [[], [(7, 0)]]
    """

    def __init__(
        self,
        answer: Answer,
        max_slots: int = 64,
        max_length: int = 4096,
        vocab: int = 1 << 20,
        max_versions: int = 4,
        step_s: Callable[[int], float] = lambda running: 0.0,
        logprob: float | Logprob = LOGPROB,
        name: str = "fake",
    ) -> None:
        """`step_s`: seconds that count as those of a step with so many running requests. Nothing waits.
        `logprob`: of each token; 0.0 is the honest one where `answer` leaves nothing to chance. `name`: as
        panels and logs show it."""
        self.updates: list[PolicyUpdate] = []
        """Every policy it was given."""
        self.loads: list[PolicyUpdate] = []
        """Every policy that was loaded beside the newest."""
        self._loaded: set[int] = set()
        """Versions that were loaded and not asked for yet."""
        self.closed = False
        self.stepped_s = 0.0
        """Seconds of all steps by `step_s`."""
        self.capabilities = Capabilities(
            name=name,
            inflight=frozenset({"keep", "recompute"}),
            max_versions=max_versions,
            max_running=max_slots,
            max_length=max_length,
            exact_resume=True,
        )
        self._answer = answer
        self._step_s = step_s
        self._logprob = logprob if callable(logprob) else lambda request, place, token: logprob
        self._queue = RequestQueue(max_length, vocab)
        self._running: list[_Running] = []
        self._counters = EngineCounters()

    @property
    def policy_version(self) -> int:
        return self.updates[-1].version if self.updates else 0

    def check(self, request: Request) -> None:
        self._queue.check(request, self._live_versions())

    def submit(self, requests: Iterable[Request]) -> None:
        self._queue.submit(requests, self._live_versions())

    def step(self) -> Sequence[Output]:
        if not self._queue.in_flight:
            return ()
        for request in self._queue.take(self.capabilities.max_running - len(self._running)):
            self._start(request)
        for running in self._running:
            running.advance()
        self._counters.generated_tokens += len(self._running)
        self.stepped_s += self._step_s(len(self._running))
        return self._leave(lambda running: running.finish())

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        chosen = None if request_ids is None else set(request_ids)
        waiting = self._queue.withdraw(chosen)
        running = self._leave(
            lambda running: "abort" if chosen is None or running.request.request_id in chosen else None
        )
        return [*running, *map(untouched, waiting)]

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        followers = [running for running in self._running if running.request.version is None]
        stay = [running for running in self._running if running not in followers]
        waiting = {request.version for request in self._queue.waiting}
        live = {update.version, *(running.version for running in stay), *waiting} - {None, BASE_VERSION}
        if len(live) > self.capabilities.max_versions:
            raise EngineError(f"{len(live)} policy versions would be live", hint='use "keep"')
        for running in followers:
            running.version, running.stale = update.version, inflight == "keep"
            if inflight == "recompute":
                self._counters.reprefilled_tokens += len(running.request.prompt_ids) + running.done - 1
        self.updates.append(update)
        self._counters.swaps += 1

    def load(self, update: PolicyUpdate) -> None:
        live = self._live_versions()
        if update.version in live:
            return
        if len(live) == self.capabilities.max_versions:
            raise EngineError(f"{len(live) + 1} policy versions would be live")
        self.loads.append(update)
        self._loaded.add(update.version)

    def stats(self) -> EngineStats:
        return self._counters.stats(len(self._running), len(self._queue), self._live_versions())

    def snapshot(self, request_ids: Iterable[str] | None = None) -> tuple[Request, ...]:
        chosen = None if request_ids is None else set(request_ids)
        running = [running.request.resumed(running.sampled()) for running in self._running]
        in_flight = (*running, *self._queue.waiting)
        return tuple(one for one in in_flight if chosen is None or one.request_id in chosen)

    def sleep(self) -> Sequence[Output]:
        return self.abort()

    def close(self) -> None:
        self.closed = True

    def _live_versions(self) -> set[int]:
        """Returns the live versions: the newest, and the ones that a request uses."""
        used = {running.version for running in self._running}
        asked = {request.version for request in self._queue.waiting if request.version is not None}
        return {self.policy_version, *self._loaded, *used, *asked} - {BASE_VERSION}

    def _start(self, request: Request) -> None:
        answer = tuple(self._answer(request))
        if len(answer) <= len(request.sampled):
            raise EngineError(
                f"the scripted answer to {request.request_id} has no token {len(request.sampled) + 1}",
                hint="end it with EOS",
            )
        version = self.policy_version if request.version is None else request.version
        self._loaded.discard(version)
        self._running.append(_Running(request, answer, version, self._logprob))
        self._counters.started(request)

    def _leave(self, reason: Callable[[_Running], FinishReason | None]) -> list[Output]:
        outputs: list[Output] = []
        staying: list[_Running] = []
        for running in self._running:
            if (finish := reason(running)) is None:
                staying.append(running)
            else:
                outputs.append(Output(running.request.request_id, running.sampled(), finish))
                self._queue.close(running.request.request_id)
        self._running = staying
        return outputs
