"""The most that partial rollouts could gain over waiting for all, from what steps and prompts cost there.

partial.py -> [StepRecorder] -> engine
                    |
                    v  steps of `sync` -> [ceilings] -> claims of partial.py

A step that only decodes takes a + b n + c k CPU seconds: n requests, k tokens that all of them look back on.
The requests of both schedulers look back on the same tokens in all, so per response only `a` differs. A
synchronous round of N responses of `mean` tokens takes as many steps as its longest has tokens; the same
responses, with C of them at any time, take N mean / C steps:

    ceiling              (a longest / N + b' mean) / (a mean / C + b' mean),  b' = b + c (k / n on average)
    with prompts         the same with p added above and below: computing a prompt and starting its request

The first is the closed form of the literature; prompts cost both sides the same, so the second is lower, and
closer to what can be had. Starting requests in the midst of others may cost less than p, which is measured
where all start at once, and the cost of a step is no line: both can carry a gain past its ceiling.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple

import numpy

from swarmnode.rollout.engine import Engine, InFlight, Output, PolicyUpdate, Request

TOLERANCE = 0.05
"""Relative errors beyond this count less and less: hiccups of a shared machine."""
REFITS = 20


class Step(NamedTuple):
    """One step of the engine."""

    running: int
    context: int
    """Tokens that all of them look back on together before it."""
    started: int
    """Of the running ones: those without a token yet."""
    cpu_s: float


class StepRecorder:
    """An engine that notes what its steps cost while somebody records. Everything is the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._at_step_0: dict[str, int] = {}  # tokens of each request, less the steps before it started
        self._sum_at_step_0 = self._steps_done = self._new = 0
        self._steps: list[Step] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def recording(self, steps: list[Step]) -> Iterator[None]:
        """Steps inside are added to these."""
        self._steps = steps
        try:
            yield
        finally:
            self._steps = None

    def submit(self, requests: Iterable[Request]) -> None:
        asked = list(requests)
        self._engine.submit(asked)
        self._new += len(asked)
        for request in asked:
            tokens = len(request.prompt_ids) + len(request.sampled) - self._steps_done
            self._at_step_0[request.request_id] = tokens
            self._sum_at_step_0 += tokens

    def step(self) -> Sequence[Output]:
        running = len(self._at_step_0)
        context = self._sum_at_step_0 + self._steps_done * running
        started = time.process_time()
        outputs = self._engine.step()
        spent = time.process_time() - started
        if self._steps is not None:
            self._steps.append(Step(running, context, self._new, spent))
        self._new, self._steps_done = 0, self._steps_done + 1
        return self._without(outputs)

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        return self._without(self._engine.abort(request_ids))

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        self._engine.set_policy(update, inflight)

    def _without(self, outputs: Sequence[Output]) -> Sequence[Output]:
        for output in outputs:
            self._sum_at_step_0 -= self._at_step_0.pop(output.request_id)
        return outputs


class Cost(NamedTuple):
    """CPU seconds of a step, of a request in it, of a token it looks back on; of a prompt and its request."""

    base_s: float
    per_request_s: float
    per_context_s: float
    prompt_s: float


def measured_cost(steps: Sequence[Step]) -> Cost:
    """Least squares over all steps that only decode; a prompt is what the other steps take beyond that."""
    decoding = [step for step in steps if not step.started]
    starting = [step for step in steps if step.started]
    if not decoding or not starting:
        raise RuntimeError("the synchronous rounds were too few to measure a step")
    base, request, context = _fitted(decoding, terms=3)
    if context < 0:
        base, request, context = *_fitted(decoding, terms=2), 0.0
    prompts = [(step.cpu_s - base - request * step.running) / step.started for step in starting]
    return Cost(base, request, context, fmean(prompts))


def _fitted(steps: Sequence[Step], terms: int) -> list[float]:
    columns = numpy.array([(1.0, step.running, step.context)[:terms] for step in steps])
    seconds = numpy.array([step.cpu_s for step in steps])
    weights = 1 / seconds
    found = numpy.zeros(terms)
    for _ in range(REFITS):
        found = numpy.linalg.lstsq(columns * weights[:, None], seconds * weights, rcond=None)[0]
        errors = abs(seconds - columns @ found) / seconds
        weights = 1 / seconds / numpy.sqrt(numpy.maximum(errors / TOLERANCE, 1.0))
    return [float(value) for value in found]


def gain_ceiling(alpha: float, tail: float, round_requests: int, concurrency: int) -> float:
    """Returns the largest gain of refilling over waiting for all, as a ratio of trained responses per second.

    A synchronous round of N takes L_max steps of `a` and N * mean tokens of `b`; with C requests at any time
    it is N * mean / C steps for the same tokens."""
    return (alpha * tail / round_requests + 1) / (alpha / concurrency + 1)


def ceilings(
    steps: Sequence[Step], *, mean: float, longest: float, round_requests: int, concurrency: int
) -> dict[str, float]:
    """From the steps of synchronous rounds, their mean length and the mean of each round's longest."""
    cost = measured_cost(steps)
    looked_back = sum(step.context for step in steps) / sum(step.running for step in steps)
    each = cost.per_request_s + cost.per_context_s * looked_back
    alpha, tail = cost.base_s / each, longest / mean
    sync = cost.base_s * longest / round_requests + each * mean + cost.prompt_s
    refill = cost.base_s * mean / concurrency + each * mean + cost.prompt_s
    return {
        "alpha": alpha,
        "step base ms": cost.base_s * 1e3,
        "step per request ms": each * 1e3,
        "prompt ms": cost.prompt_s * 1e3,
        "rho": tail,
        "C used": concurrency,
        "ceiling at C = N": gain_ceiling(alpha, tail, round_requests, round_requests),
        "ceiling at C used": gain_ceiling(alpha, tail, round_requests, concurrency),
        "ceiling with prompts at C used": sync / refill,
    }
