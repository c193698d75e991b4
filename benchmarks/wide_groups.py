"""What the largest legal group of a stranger costs a node: decode, redraw, tokenize, judge, choose.

    python benchmarks/wide_groups.py [--quick] [--json FILE]

The tiny policy's tokenizer and a built-in task check bodies as they come from the network, and 16 answers are
kept (rollout.group_size = 8). Three kinds of body:

    preset    answers as long as the preset `tiny` takes (10 tokens)
    largest   as many characters as a body may hold, 4 MiB, in answers of equal length
    slow      a judge that takes 20 ms an answer: it looks at a part of the group only

Baseline: a group of 64 answers, the limit of protocol 1, in the same run. Claims: milliseconds of the largest
legal group of each kind (median; `_64` those of 64 answers) and the share that the slow judge looked at.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from common import arguments, interleaved, middle, report

from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.limits import MAX_GROUP_SIZE, MAX_RAW_BODY_BYTES
from swarmnode.exchange.messages import Announcement, Arrival
from swarmnode.exchange.validation.body_check import BodyRules, check_body
from swarmnode.identity.node_key import NodeKey
from swarmnode.model.base_model import load_base_model
from swarmnode.model.demonstration.tiny import build_quick_tiny
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import PolicyConfig
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.task import Task, draw_train
from swarmnode.types import Completion, Example, RolloutGroup, one_span

BEFORE = 64
"""Answers of the largest group of protocol 1."""
KEPT = 16
SLOW_S = 0.02
KEY = NodeKey(b"\7" * 32)


@dataclass
class Slow:
    """A task whose judge takes its time, and counts the answers that it saw."""

    task: Task
    judged: int = 0

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def version(self) -> str:
        return self.task.version

    def examples(self, seed: int) -> Iterator[Example]:
        return iter(self.task.examples(seed))

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        self.judged += len(completions)
        time.sleep(SLOW_S * len(completions))
        return self.task.score(example, completions)


def a_body(task: Task, answers: int, characters: int) -> tuple[bytes, Announcement]:
    """A group of which one answer in eight is right, as it comes from the network."""
    example = next(islice(draw_train(task, 1), 0, None))
    rng = random.Random(0)
    right = str(example.columns["answer"])
    texts = [
        right if place % 8 == 0 else "".join(rng.choices("ab", k=characters)) for place in range(answers)
    ]
    group = RolloutGroup(
        example,
        tuple(Completion(text, (1,), None, one_span(1, 1), "length") for text in texts),
        tuple({"correct": float(text == right)} for text in texts),
        KEY.peer_id,
        1,
    )
    sent = compose(group, KEY, swarm="test", model=ModelLabel("tiny", 1), now=time.time())
    if sent.header.group_size != answers:
        raise RuntimeError(f"a body of {answers} answers with {characters} characters does not travel")
    return sent.body, Announcement(KEY.peer_id, sent.header, sent.sealed, Arrival(time.time(), 0))


def main() -> None:
    options = arguments(__doc__ or "")
    task = next(task for task in BUILTIN_TASKS if task.name == "rev")
    slow = Slow(task)
    with TemporaryDirectory() as folder:
        base = load_base_model(str(build_quick_tiny(Path(folder))), PolicyConfig())
    renderer = Renderer(base.tokenizer, base.eos_token_ids)
    rules = BodyRules(
        {task.name: task},
        renderer.encode_completion,
        renderer.prompt_ids,
        max_prompt_tokens=64,
        max_completion_tokens=10,
        answers_per_group=KEPT,
    )
    # A body of 4 MiB holds 512 answers of this length, with a few bytes around each of them.
    longest = MAX_RAW_BODY_BYTES // MAX_GROUP_SIZE - 16
    kinds = {
        "preset": (rules, 10),
        "largest": (replace(rules, max_completion_tokens=longest), longest),
        "slow": (replace(rules, tasks={task.name: slow}), 10),
    }

    def measured(kind: str, answers: int) -> float:
        judge, characters = kinds[kind]
        body, announcement = bodies[kind, answers]
        began = time.perf_counter()
        checked = check_body(body, announcement, judge)
        took_ms = 1000 * (time.perf_counter() - began)
        if len(checked.group.completions) != KEPT or checked.false_claim:
            raise RuntimeError(f"{kind} with {characters} characters was not kept as it should be")
        return took_ms

    sizes = (MAX_GROUP_SIZE, BEFORE)
    bodies = {(kind, size): a_body(task, size, kinds[kind][1]) for kind in kinds for size in sizes}
    variants = {
        f"{kind}_{size}_ms": (lambda kind=kind, size=size: measured(kind, size))
        for kind in kinds
        for size in sizes
    }
    found = {name: middle(times) for name, times in interleaved(variants, 3 if options.quick else 15).items()}
    for (kind, size), (body, announcement) in bodies.items():
        took_ms, _ = found[f"{kind}_{size}_ms"]
        print(f"{kind}: {announcement.header.group_size} answers, {len(body)} bytes: {took_ms:.1f} ms")
    slow.judged = 0
    measured("slow", MAX_GROUP_SIZE)
    claims = {name: value for name, (value, _) in found.items()}
    claims["slow_looked_at_share"] = slow.judged / MAX_GROUP_SIZE
    spread = {name: quartiles for name, (_, quartiles) in found.items()}
    report("wide_groups", claims, spread, options.json)


if __name__ == "__main__":
    main()
