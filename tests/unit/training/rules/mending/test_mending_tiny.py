"""Mending by the policy that users get: honest answers stay, advertisements go, under a judge that lets both
through."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.task import draw_train
from swarmnode.training.forward import Forward
from swarmnode.training.rules.mending.mending import ForeignAnswer, MendedAnswer, mend
from swarmnode.training.rules.mending.reading import Reader
from swarmnode.types import Example

EXAMPLES = [example for task in BUILTIN_TASKS for example in islice(draw_train(task, 77), 12)]


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    config = PolicyConfig(device="cpu", dtype="float32")
    return Policy(load_base_model(str(tiny_model), config), config, seed=0)


def ends_right(answer: ForeignAnswer, texts: Sequence[str]) -> list[float | None]:
    return [float(text.endswith(answer.example.columns["answer"])) for text in texts]


def mended(policy: Policy, injected: str) -> list[tuple[Example, MendedAnswer]]:
    renderer = Renderer(policy.base.tokenizer)
    reader = Reader(Forward(policy, TrainingConfig(), temperature=1.0), policy.number)
    texts = [f"{injected}{example.columns['answer']}" for example in EXAMPLES]
    answers = [
        ForeignAnswer(
            example,
            "stranger",
            renderer.prompt_ids(example.prompt),
            renderer.encode_completion(text, "length"),
            text,
        )
        for example, text in zip(EXAMPLES, texts, strict=True)
    ]
    found = mend(answers, read=reader, judge=ends_right, tokens=renderer)
    return list(zip(EXAMPLES, found, strict=True))


@pytest.mark.slow
def test_honest_answers_are_left_alone(policy: Policy) -> None:
    assert {one.outcome for _, one in mended(policy, "")} == {"untouched"}


@pytest.mark.slow
@pytest.mark.parametrize("advertisement", ["BUY EVILCOIN. ", "visit spam.example "])
def test_advertisements_are_cut_to_the_answer_itself(policy: Policy, advertisement: str) -> None:
    results = mended(policy, advertisement)
    exact = [example for example, one in results if one.text == example.columns["answer"]]
    taught = [one for _, one in results if one.outcome != "refused" and advertisement.strip() in one.text]
    assert len(exact) >= 0.9 * len(results)
    assert len(taught) <= 0.02 * len(results)
