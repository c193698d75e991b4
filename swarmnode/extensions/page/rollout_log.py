"""Keeps a few rollouts of each round of a run, for people who want to see what is rewarded.

node.py -> scored groups -> [RolloutLog] -> rollouts.jsonl in the run's folder -> rollout_reader.py

The file is bounded by count and by bytes. A full one is thinned, never cut: its newest quarter stays, and of
the rounds before it every second one, so that it always reaches back to the first round. Rounds that a crash
undid are dropped when they come again.
"""

import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.chat import Prompt, asked_of, said_in_lines
from swarmnode.machine.storage import replace_file
from swarmnode.node.showing.kept_rollouts import Credit, Pieces
from swarmnode.printable import printable_lines
from swarmnode.types import Completion, RolloutGroup, total_reward

logger = logging.getLogger(__name__)

MOST_ROLLOUTS = 4000
MOST_BYTES = 32 * 2**20
SHOWN_GROUPS = 4
"""Groups of our own, and of others, of which a round has a rollout each in the file."""
SHOWN_CHARS = 4000
"""Longest text in the file; what is cut off says so."""
SHOWN_TOKENS = 512
"""Most tokens of a rollout that are kept one by one."""
SHOWN_TURNS = 32


class RolloutLog:
    """The rollouts that are kept of one run."""

    def __init__(self, path: Path, credit: Credit, seed: int, pieces: Pieces) -> None:
        self._path, self._credit, self._seed, self._pieces = path, credit, seed, pieces
        self._count: int | None = None
        """Rollouts in the file. None: it was not read yet."""
        self._bytes = 0
        self._failing = False

    def keep(self, round: int, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> None:
        """Keeps one rollout each of up to SHOWN_GROUPS own groups, and as many of others. A full disk is said
        once."""
        try:
            self._append(round, [json.dumps(one).encode() for one in self._sampled(round, own, external)])
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning("no rollouts are kept: cannot write %s (%s)", self._path, error.strerror)
            self._failing = True

    def _append(self, round: int, lines: Sequence[bytes]) -> None:
        if self._count is None:
            self._keep_of_file(lambda rounds: {number for number in rounds if number < round})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))
        self._count = (self._count or 0) + len(lines)
        self._bytes += sum(len(line) + 1 for line in lines)
        if self._count > MOST_ROLLOUTS or self._bytes > MOST_BYTES:
            self._keep_of_file(thinned)

    def _keep_of_file(self, staying: Callable[[Sequence[int]], set[int]]) -> None:
        """Drops the rounds of the file that do not stay."""
        found = _read(self._path)
        stay = staying(sorted({number for number, _ in found}))
        lines = [line for number, line in found if number in stay]
        content = b"".join(line + b"\n" for line in lines)
        if len(lines) < len(found):
            replace_file(self._path, content)
        self._count, self._bytes = len(lines), len(content)

    def _sampled(
        self, round: int, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]
    ) -> Iterator[dict[str, Any]]:
        chance = random.Random(f"{self._seed}:{round}:shown")
        for groups, author in ((own, "own"), (external, None)):
            for group in chance.sample(groups, min(SHOWN_GROUPS, len(groups))):
                place = chance.randrange(len(group.completions))
                credit = self._credit(group)
                yield {
                    "round": round,
                    "author": author or legible(group.author),
                    "task": group.example.key.task,
                    "prompt": legible(asked_of(group.example.prompt)),
                    **self._answer(group.completions[place]),
                    "reward": total_reward(group.scores[place]),
                    "rewards": dict(group.scores[place]),
                    "group_rewards": group.rewards,
                    "advantage": None if credit is None else credit[place],
                    "policy_version": group.policy_version,
                    **_messages(group.example.prompt),
                }

    def _answer(self, completion: Completion) -> dict[str, Any]:
        shown = completion.token_ids[:SHOWN_TOKENS]
        logprobs = completion.logprobs
        found: dict[str, Any] = {
            "completion": legible(said_in_lines(completion.said)),
            "finish": completion.finish,
            "tokens": [legible(piece) for piece in self._pieces(shown)],
            "tokens_in_all": len(completion.token_ids),
            "logprobs": None if logprobs is None else [round(one, 4) for one in logprobs[: len(shown)]],
            "spans": [[span.version, span.start, span.end, span.kv] for span in completion.spans],
            "given": list(completion.given),
        }
        if not isinstance(completion.said, str):
            found["turns"] = [
                [legible(turn.said), [[one["role"], legible(one["content"])] for one in turn.observed]]
                for turn in completion.said[:SHOWN_TURNS]
            ]
        return found


def thinned(rounds: Sequence[int]) -> set[int]:
    """Returns the rounds that stay of these, which are in order: the first, every second one, and the newest
    quarter.

    >>> sorted(thinned(range(1, 9)))
    [1, 3, 5, 7, 8]
    """
    newest = len(rounds) - max(1, len(rounds) // 4)
    return {number for place, number in enumerate(rounds) if place % 2 == 0 or place >= newest}


def legible(text: str) -> str:
    """Returns the text with its lines, and nothing in it that steers a terminal, whoever wrote it."""
    surplus = len(text) - SHOWN_CHARS
    shown = printable_lines(text[:SHOWN_CHARS], max_lines=SHOWN_CHARS)
    return f"{shown}... ({surplus} more characters)" if surplus > 0 else shown


def _messages(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {}
    messages = prompt.messages[-SHOWN_TURNS:]
    return {"messages": [[legible(one["role"]), legible(one["content"])] for one in messages]}


class RolloutLine(msgspec.Struct):
    """The part of a line of the file that tells lines apart."""

    round: int


def _read(path: Path) -> list[tuple[int, bytes]]:
    """Returns the lines of the file with their rounds; half a line, of a crash, is left out."""
    found: list[tuple[int, bytes]] = []
    with suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                found.append((msgspec.json.decode(line, type=RolloutLine).round, line))
    return found
