"""An environment with two tools, and a policy that knows how to use them: for tests of conversations.

Asked for the sum of two numbers that it is not told, a policy looks each up (`look 0`, `look 1`), has them
added (`add 3 4`) and says what comes out. All of it is a function of the example and of what was said.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from swarmnode.chat import Message, Said, Turn, turns_of
from swarmnode.errors import JudgementLost
from swarmnode.rollout.engine import Request
from swarmnode.types import Example, ExampleKey

EOS = 0


class TwoTools:
    """The environment."""

    name, version, exchangeable, most_turns = "two tools", "1", True, 8

    def __init__(self, before: Callable[[Example, int], None] = lambda example, turn: None) -> None:
        """`before` is told of every turn before it is answered: it may wait, or raise."""
        self.before = before
        self.played: list[int] = []
        """The turns that were answered, by how many there had been."""

    def examples(self, seed: int) -> Iterator[Example]:
        for index in range(4096):
            numbers = (seed + index) % 7, index % 5
            key = ExampleKey(self.name, self.version, seed, index)
            yield Example(key, f"Sum of round {seed}, question {index}?", {"numbers": numbers})

    def observe(self, example: Example, turns: Sequence[Turn]) -> tuple[Message, ...] | None:
        self.before(example, len(turns))
        self.played.append(len(turns))
        tool, *given = turns[-1].said.split()
        match tool:
            case "look":
                heard = example.columns["numbers"][int(given[0])]
            case "add":
                heard = sum(map(int, given))
            case _:
                return None
        return ({"role": "tool", "content": str(heard)},)

    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]:
        return [{"right": float(last_words(text) == str(sum_of(example)))} for text in completions]


def sum_of(example: Example) -> int:
    """The right answer."""
    return sum(example.columns["numbers"])


def last_words(said: Said) -> str:
    """What the policy said last in an episode."""
    return turns_of(said)[-1].said


def lost(example: Example, turn: int) -> None:
    """`before` of an environment that died."""
    raise JudgementLost("its process died")


class Letters:
    """A renderer of one token per character, EOS apart."""

    eos_token_ids = (EOS,)

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def observation_ids(self, observed: Sequence[Message]) -> tuple[int, ...]:
        return tuple(map(ord, "".join(f"\n{message['content']}\n" for message in observed)))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != EOS)


def said(text: str) -> tuple[int, ...]:
    """A whole turn as tokens."""
    return (*map(ord, text), EOS)


def skilled(request: Request, given: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The turns of a policy that can do it (testing/fake_engine.py: by_turns)."""
    heard = [Letters().decode(ids).strip() for ids in given]
    match heard:
        case []:
            return said("look 0")
        case [_]:
            return said("look 1")
        case [first, second]:
            return said(f"add {first} {second}")
        case _:
            return said(heard[-1])
