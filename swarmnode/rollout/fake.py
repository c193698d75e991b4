"""An engine that gives scripted answers, for tests of everything above the engine. No torch.

collector.py -> submit -> [fake] -> Output

It keeps the whole contract: a token per step, slots, stop and length, abort with the tokens so far.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import EngineStats, Output, PolicyUpdate, Request
from swarmnode.rollout.requests import RequestQueue, untouched
from swarmnode.types import FinishReason

LOGPROB = -0.5
"""Every token of a fake engine is this likely."""


@dataclass(slots=True)
class _Running:
    request: Request
    answer: tuple[int, ...]
    tokens: list[int] = field(default_factory=list[int])

    def finish(self) -> FinishReason | None:
        if len(self.tokens) == len(self.answer):
            return "stop"
        return "length" if len(self.tokens) == self.request.sampling.max_tokens else None

    def output(self, version: int, finish: FinishReason) -> Output:
        tokens = tuple(self.tokens)
        return Output(self.request.request_id, tokens, (LOGPROB,) * len(tokens), version, finish)


class FakeEngine:
    """Answers each request with `answer(request)`: the tokens a policy would sample, its EOS token included.

    >>> engine = FakeEngine(lambda request: (*request.prompt_ids, 0))
    >>> engine.submit([Request("a", (7,), SamplingParams(max_tokens=4))])
    >>> [list(engine.step()), [output.token_ids for output in engine.step()]]
    [[], [(7, 0)]]
    """

    def __init__(
        self,
        answer: Callable[[Request], Sequence[int]],
        max_slots: int = 64,
        max_length: int = 4096,
        vocab: int = 1 << 20,
    ) -> None:
        self.updates: list[PolicyUpdate] = []
        """Every policy it was given."""
        self._answer = answer
        self._max_slots = max_slots
        self._queue = RequestQueue(max_length, vocab)
        self._running: list[_Running] = []
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @property
    def policy_version(self) -> int:
        return self.updates[-1].version if self.updates else 0

    def submit(self, requests: Iterable[Request]) -> None:
        self._queue.submit(requests)

    def step(self) -> Sequence[Output]:
        if not self._queue.in_flight:
            return ()
        for request in self._queue.take(self._max_slots - len(self._running)):
            answer = tuple(self._answer(request))
            if not answer:
                raise EngineError(
                    f"the scripted answer to {request.request_id} is empty", hint="end it with EOS"
                )
            self._running.append(_Running(request, answer))
            self._prompt_tokens += len(request.prompt_ids)
        for running in self._running:
            running.tokens.append(running.answer[len(running.tokens)])
        self._generated_tokens += len(self._running)
        return self._leave(lambda running: running.finish())

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        chosen = None if request_ids is None else set(request_ids)
        waiting = self._queue.withdraw(chosen)
        running = self._leave(
            lambda running: "abort" if chosen is None or running.request.request_id in chosen else None
        )
        return [*running, *(untouched(request, self.policy_version) for request in waiting)]

    def set_policy(self, update: PolicyUpdate) -> None:
        self._queue.refuse_update(update)
        self.updates.append(update)

    def stats(self) -> EngineStats:
        return EngineStats(
            len(self._running),
            len(self._queue),
            self._prompt_tokens,
            self._generated_tokens,
            generation_s=0.0,
        )

    def _leave(self, reason: Callable[[_Running], FinishReason | None]) -> list[Output]:
        outputs: list[Output] = []
        staying: list[_Running] = []
        for running in self._running:
            if (finish := reason(running)) is None:
                staying.append(running)
            else:
                outputs.append(running.output(self.policy_version, finish))
                self._queue.close(running.request.request_id)
        self._running = staying
        return outputs
