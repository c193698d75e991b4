"""Conversations with an engine: a policy says something, somebody answers, the policy goes on."""

from dataclasses import dataclass, replace

from swarmnode.rollout.engine import NOTHING, Request, Sampled, SamplingParams

TURN_TOKENS = 6
"""The longest turn. Most end before, at one of STOPS."""

STOPS = tuple(range(1, 20))
"""Tokens that end a turn: about a third of those that the small models of the tests know."""


@dataclass(frozen=True)
class Talk:
    """One conversation, as far as it has come."""

    name: str
    prompt: tuple[int, ...]
    seed: int
    said: Sampled = NOTHING
    version: int | None = None

    def request(self, goes_on: bool) -> Request:
        """The next turn."""
        sampling = SamplingParams(len(self.said) + TURN_TOKENS, seed=self.seed, stop_token_ids=STOPS)
        return Request(self.name, self.prompt, sampling, self.said, self.version, goes_on=goes_on)

    def with_said(self, said: Sampled) -> "Talk":
        return replace(self, said=said)

    def told(self, answer: tuple[int, ...]) -> "Talk":
        """With what somebody else says behind it."""
        start, end = len(self.said), len(self.said) + len(answer)
        span = replace(self.said.spans[-1], start=start, end=end)
        longer = self.said.extended(answer, (0.0,) * len(answer), [span])
        return self.with_said(replace(longer, given=(*self.said.given, (start, end))))

    @property
    def sampled_places(self) -> list[int]:
        """Which tokens the policy said itself."""
        given = {place for start, end in self.said.given for place in range(start, end)}
        return [place for place in range(len(self.said)) if place not in given]
