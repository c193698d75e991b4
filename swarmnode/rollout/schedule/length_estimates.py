"""Expected lengths of answers, so that the longest start first.

ended groups -> observe -> [LengthEstimates] -> longest_first -> the next groups to begin
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

from swarmnode.bounded_dict import BoundedDict
from swarmnode.chat import written_prompt
from swarmnode.types import Example

# ---- expected lengths of the answers to a prompt ----

NEWEST_SHARE = 0.5
"""Weight of the newest group in a prompt's average: the policy changes, and its answers with it."""
NEWEST_SHARE_OF_TASK = 0.1
"""Weight of the newest length in a task's average; smaller, because single prompts differ much more."""
MAX_PROMPTS = 4096
MAX_TASKS = 256


class LengthEstimates:
    """Expected completion lengths in tokens.

    >>> from swarmnode.types import ExampleKey
    >>> short = Example(ExampleKey("sums", "1", 0, 0), "1+1")
    >>> long = Example(ExampleKey("sums", "1", 0, 1), "9*9")
    >>> lengths = LengthEstimates()
    >>> lengths.observe(short, 5), lengths.observe(long, 50)
    (None, None)
    >>> [example.prompt for example in lengths.longest_first([short, long])]
    ['9*9', '1+1']
    """

    def __init__(self, prompts: Mapping[str, float] | None = None, tasks: Mapping[str, float] | None = None):
        """`prompts` and `tasks`: averages to begin with; empty by default."""
        self._prompts = _Averages(prompts or {}, MAX_PROMPTS, NEWEST_SHARE)
        self._tasks = _Averages(tasks or {}, MAX_TASKS, NEWEST_SHARE_OF_TASK)

    def observe(self, example: Example, mean_tokens: float) -> None:
        """Records the mean length of a group of completions."""
        self._prompts.observe(_prompt_digest(example), mean_tokens)
        self._tasks.observe(example.key.task, mean_tokens)

    def expected_tokens(self, example: Example) -> float | None:
        """Returns the expected length in tokens. None: neither the prompt nor its task has been answered
        before."""
        own = self._prompts.values.get(_prompt_digest(example))
        return self._tasks.values.get(example.key.task) if own is None else own

    def longest_first(self, examples: Sequence[Example]) -> list[Example]:
        """Returns the examples in the order in which they should start; equal ones keep their order. Unknown
        lengths come first: they may be long, and are worth knowing."""

        def shortness(example: Example) -> float:
            expected = self.expected_tokens(example)
            return -math.inf if expected is None else -expected

        return sorted(examples, key=shortness)

    @property
    def prompts(self) -> Mapping[str, float]:
        """Averages by digest of the prompt, least recently updated first."""
        return self._prompts.values

    @property
    def tasks(self) -> Mapping[str, float]:
        return self._tasks.values


class _Averages:
    """Exponential moving averages by name, of at most `size` names."""

    def __init__(self, values: Mapping[str, float], size: int, newest_share: float) -> None:
        self.values = BoundedDict[str, float](size)
        self.values.update(values)
        self._newest_share = newest_share

    def observe(self, name: str, value: float) -> None:
        before = self.values.get(name, value)
        self.values[name] = before + self._newest_share * (value - before)


def _prompt_digest(example: Example) -> str:
    return hashlib.blake2b(written_prompt(example.prompt).encode(), digest_size=8).hexdigest()
