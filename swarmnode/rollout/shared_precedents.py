"""What the engine below a shared one has accepted already, so that it need not be asked again.

shared.py: submit -> [Precedents] -> the engine, when a request asks for more than any before it

A request of a member waits here until it gets a row, and must be refused before that, if at all. An engine
refuses by tokens, length and sampling: what asks for no more than an accepted request did, is acceptable.
"""

from dataclasses import replace

from swarmnode.rollout.engine import BASE_VERSION, Request, SamplingParams

MOST_KINDS = 256
"""Ways of sampling that are remembered; a node has one or two."""

Kind = tuple[SamplingParams, bool]
"""All that is said about sampling except for the seed, and whether it is the base that samples."""


class Precedents:
    """The longest request and the highest token of each kind that the engine took.

    >>> precedents = Precedents()
    >>> taken = Request("a", (5, 9), SamplingParams(4, seed=1))
    >>> precedents.cover(taken), precedents.add(taken), precedents.cover(taken)
    (False, None, True)
    >>> precedents.cover(Request("b", (9, 8), SamplingParams(4, seed=2)))
    True
    >>> precedents.cover(Request("c", (10,), SamplingParams(4, seed=3)))
    False
    """

    def __init__(self) -> None:
        self._most: dict[Kind, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Kinds that are remembered."""
        return len(self._most)

    def cover(self, request: Request) -> bool:
        """Whether the engine takes this one without being asked."""
        length, highest = self._most.get(_kind(request), (0, -1))
        tokens = request.prompt_ids + request.sampled.token_ids
        return 0 < len(request.prompt_ids) <= length and min(tokens) >= 0 and max(tokens) <= highest

    def add(self, request: Request) -> None:
        """The engine took this one."""
        kind, tokens = _kind(request), request.prompt_ids + request.sampled.token_ids
        length, highest = self._most.pop(kind, (0, -1))
        if len(self._most) >= MOST_KINDS:
            self._most.clear()
        self._most[kind] = max(length, len(request.prompt_ids)), max(highest, *tokens)


def _kind(request: Request) -> Kind:
    return replace(request.sampling, seed=None), request.version == BASE_VERSION
