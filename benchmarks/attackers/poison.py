"""Groups that an attacker announces: signed, drawn from the built-in tasks, and well-formed in every byte.

attacks -> [Poisoner] -> header for gossip, body for whoever asks

What is hostile about them is what they say, or how their bodies come; the codec and the signature are the
project's own, so no parser stops them.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.messages import Answer, Body, encode_body, encode_header, hash_body
from swarmnode.exchange.validation.header_check import HEADER_CONTEXT
from swarmnode.identity.envelope import seal
from swarmnode.identity.node_key import NodeKey
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.task import draw_train, score_strictly
from swarmnode.types import Completion, Example, FinishReason, RolloutGroup, one_span

GROUP = 8
LONG_ANSWERS = 10
LONG_ANSWER_CHARS = 120 * 1024
"""Ten of them compress to a little under 1 MiB, the longest body that may be announced."""

PRINTABLE = bytes(32 + byte % 95 for byte in range(256))

Marked = tuple[str, FinishReason]
Style = Callable[[Example, random.Random], Sequence[Marked]]


def honestly(example: Example, rng: random.Random) -> Sequence[Marked]:
    """Half of the answers right, and every mark true."""
    return [(text, "stop") for text, _ in _answers(example, rng)]


def lying(example: Example, rng: random.Random) -> Sequence[Marked]:
    """The same answers; the right ones are said to have been cut off, the wrong ones to have ended."""
    return [(text, "length" if right else "stop") for text, right in _answers(example, rng)]


def at_length(example: Example, rng: random.Random) -> Sequence[Marked]:
    """Half of the answers right, the others forty characters long."""
    return [(text if right else text.ljust(40, "."), "stop") for text, right in _answers(example, rng)]


def wrongly(example: Example, rng: random.Random) -> Sequence[Marked]:
    """One right answer, and all others wrong by a character."""
    answers = _answers(example, rng)
    right = next(text for text, is_right in answers if is_right)
    return [(right, "stop"), *((text, "stop") for text, is_right in answers if not is_right)]


def _noise(rng: random.Random) -> str:
    """Printable characters that compress to little less than they are."""
    return rng.randbytes(LONG_ANSWER_CHARS).translate(PRINTABLE).decode("ascii")


def _answers(example: Example, rng: random.Random) -> list[tuple[str, bool]]:
    right = str(example.columns["answer"])
    # Wrong by one character: the rest of it is what the right answers teach, so that only the mark differs.
    wrong = [f"{right[:-1]}{rng.choice('qxz')}" if right[-1:] not in "qxz" else right[:-1] for _ in range(4)]
    answers = [(right, True)] * (GROUP // 2) + [(text, False) for text in wrong]
    rng.shuffle(answers)
    return answers


@dataclass
class Poisoner:
    """One author. Groups are numbered; each number is an example of its own."""

    key: NodeKey
    swarm: str
    seed: int

    def group(self, number: int, style: Style = honestly) -> SignedGroup:
        """A group whose header tells the truth about its rewards."""
        example, rng = self._example(number)
        marked = style(example, rng)
        scores = score_strictly(BUILTIN_TASKS[number % len(BUILTIN_TASKS)], example, [t for t, _ in marked])
        group = RolloutGroup(
            example=example,
            completions=tuple(
                Completion(text, (1,), None, one_span(0, 1), finish) for text, finish in marked
            ),
            scores=scores,
            author=self.key.peer_id,
            policy_version=number,
        )
        return compose(group, self.key, swarm=self.swarm, model=ModelLabel("tiny", 1), now=time.time())

    def one_sided(self, number: int) -> SignedGroup:
        """A group of the first task, whatever its number: true in every byte."""
        return self.group(number * len(BUILTIN_TASKS))

    def false_claim(self, number: int) -> SignedGroup:
        """Mostly wrong answers that are announced as mostly right."""
        group = self.group(number, wrongly)
        mean = group.header.reward_mean
        assert mean is not None
        header = msgspec.structs.replace(group.header, reward_mean=1.0 - mean)
        return SignedGroup(
            self.key.peer_id, header, seal(self.key, HEADER_CONTEXT, encode_header(header)), group.body
        )

    def too_long(self, number: int) -> SignedGroup:
        """Answers that no policy here could have written, in a body as large as bodies may be."""
        example, rng = self._example(number)
        texts = [_noise(rng) for _ in range(LONG_ANSWERS)]
        key = example.key
        body = encode_body(
            Body(
                author=self.key.peer_id,
                task=key.task,
                version=key.version,
                seed=key.seed,
                index=key.index,
                answers=tuple(Answer(text, "stop") for text in texts),
            )
        )
        return self._with_body(number, body, LONG_ANSWERS)

    def unheld(self, number: int) -> bytes:
        """A sealed header of a body that nobody has."""
        return self._with_body(number, random.Random(f"{self.seed}:{number}").randbytes(200), GROUP).sealed

    def _with_body(self, number: int, body: bytes, group_size: int) -> SignedGroup:
        header = msgspec.structs.replace(
            self.group(number).header, body_hash=hash_body(body), body_bytes=len(body), group_size=group_size
        )
        return SignedGroup(
            self.key.peer_id, header, seal(self.key, HEADER_CONTEXT, encode_header(header)), body
        )

    def _example(self, number: int) -> tuple[Example, random.Random]:
        seed = self.seed + number
        task = BUILTIN_TASKS[number % len(BUILTIN_TASKS)]
        return next(islice(draw_train(task, seed), 1)), random.Random(seed)
