"""A request that runs: on which policy, since when, and which spans of its completion are behind it.

torch_engine.py -> [running] -> the spans of an Output

Spans change when a policy does, never per token: until then a row is one open span that grows with the clock.
"""

from dataclasses import dataclass, replace
from typing import Literal

from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import Request
from swarmnode.types import Span


@dataclass(frozen=True, slots=True, eq=False)
class DecodePolicy:
    """One policy as it is sampled from. Two are never equal: version numbers may come again."""

    version: int
    layers: Layers
    """Empty where the engine has a single model, which changes in place."""
    is_base: bool
    """Whether it is the base model without any adapter."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request that has a row. Its clock is that of the engine: one tick, one token."""

    request: Request
    policy: DecodePolicy
    first_tick: int
    """When its first token since it has this row is sampled."""
    kv: Literal["fresh", "stale"] = "fresh"
    closed: tuple[Span, ...] = ()
    """Spans since it has this row, of the policies before this one."""

    @property
    def last_tick(self) -> int:
        """When its token budget is used up."""
        left = self.request.sampling.max_tokens - len(self.request.sampled)
        return self.first_tick + left - 1

    def spans(self, tick: int) -> tuple[Span, ...]:
        """What was sampled since it has this row, up to and with `tick`."""
        before = len(self.request.sampled)
        start = self.closed[-1].end if self.closed else before
        end = before + tick + 1 - self.first_tick
        if end == start:
            return self.closed
        return (*self.closed, Span(self.policy.version, start, end, self.kv))

    def kept_under(self, policy: DecodePolicy, tick: int) -> "Running":
        """It goes on under another policy after `tick`, with the keys and values it has."""
        return replace(self, policy=policy, kv="stale", closed=self.spans(tick))
