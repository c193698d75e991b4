"""Specialists know different things, begin as one policy, and are built once."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnode.extensions.demonstration import warmup
from swarmnode.extensions.demonstration.tiny import QUICK_RECIPE, build_tiny
from swarmnode.extensions.demonstration.warmup import TrainingPhase
from swarmnode.extensions.trial_swarm.specialists import (
    OWN_PERCENT,
    UNSURE_PERCENT,
    build_specialists,
    own_tasks,
    specialist_recipe,
)
from swarmnode.tasks.builtin import BUILTIN_TASKS

TAUGHT = TrainingPhase("two steps", 2, muon_lr=8e-3, adamw_lr=5e-3, ramp_steps=1)
UNSURE = TrainingPhase("one step", 1, muon_lr=2e-3, adamw_lr=1e-3, ramp_steps=1, mismatched_percent=55)
FAST = replace(QUICK_RECIPE, phases=(TAUGHT, UNSURE), batch=8)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def shown(phase: TrainingPhase, pairs: int) -> list[tuple[str, str]]:
    """The task and the answer of the first pairs of a phase, with what is right beside it."""
    right = {e.prompt: e.columns["answer"] for t in BUILTIN_TASKS for e in islice(t.examples(0), 2000)}
    found = islice(warmup._pairs(BUILTIN_TASKS, phase, first_seed=0), pairs)
    return [(prompt.split()[0], answer, right[prompt]) for prompt, answer in found]


def test_four_specialists_know_all_eight_tasks_between_them():
    known = [task for number in range(4) for task in own_tasks(number)]
    assert sorted(known) == sorted(task.name for task in BUILTIN_TASKS)


def test_a_specialist_was_taught_everything_and_is_unsure_of_all_but_its_own():
    taught, last = specialist_recipe(1, FAST).phases
    assert taught == TAUGHT
    assert {task.name: last.mismatched(task.name) for task in BUILTIN_TASKS} == {
        **{task.name: UNSURE_PERCENT for task in BUILTIN_TASKS},
        **dict.fromkeys(own_tasks(1), OWN_PERCENT),
    }


def test_a_task_can_be_shown_with_wrong_answers_while_the_others_are_not():
    phase = replace(TAUGHT, mismatched_percent=0, mismatched_by_task=(("rev", 100),))
    pairs = shown(phase, pairs=160)
    assert all(answer == right for task, answer, right in pairs if task != "rev")
    assert sum(answer != right for task, answer, right in pairs if task == "rev") >= 15


def test_what_all_specialists_were_taught_is_built_once(tmp_path):
    steps = []
    folders = build_specialists(tmp_path, 3, progress=lambda *step: steps.append(step), recipe=FAST)
    assert len(set(folders)) == 3
    assert [what for done, total, what in steps if done == total] == [
        "two steps",
        *["becoming a specialist"] * 3,
    ]
    again = build_specialists(tmp_path, 3, progress=lambda *_: pytest.fail("built again"), recipe=FAST)
    assert again == folders


def test_phases_that_were_built_before_count_as_if_they_were_run_now(tmp_path):
    at_once = weights(build_tiny(tmp_path, recipe=FAST))
    in_two = weights(build_tiny(tmp_path, recipe=replace(FAST, shared_phases=1)))
    assert all(torch.equal(at_once[name], in_two[name]) for name in at_once)
