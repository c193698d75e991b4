"""Data sets of reasoning-gym whose level follows the policy."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.drawing.example_stream import ExampleStream
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.task import levels_of, redraw
from swarmnode.types import Example


class Sums:
    """A data set of reasoning-gym in small: the level says how many terms."""

    def create_dataset(self, name: str, *, seed: int, size: int, terms: int = 2) -> list[dict[str, str]]:
        return [{"question": f"{seed % 97} and {n} in {terms} terms?", "answer": "1"} for n in range(200)]

    def create_curriculum(self, name: str) -> Any:
        if name == "flat":
            raise ValueError("flat has none")
        made = SimpleNamespace(attributes={"terms": SimpleNamespace(levels=[2, 3, 4])}, level=0)
        made.set_global_level = lambda level: setattr(made, "level", level)
        made.generate_configuration = lambda: SimpleNamespace(terms=2 + made.level)
        return made


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module, factory, sums = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory"), Sums()
    vars(factory).update(DATASETS={"sums": None, "flat": None}, create_curriculum=sums.create_curriculum)
    vars(module).update(create_dataset=sums.create_dataset, factory=factory)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    yield


def terms(example: Example) -> int:
    return int(example.prompt.split()[-2])


def test_reasoning_gym_asks_at_the_level_of_the_seed_and_anyone_can_draw_it_again(gym: None) -> None:
    spec = "reasoning-gym:sums?curriculum=true"
    task, theirs = load_task(spec), load_task(spec)
    assert levels_of(task) == 3 and task.version != load_task("reasoning-gym:sums").version
    now = {"sums": 2}
    stream = ExampleStream([task], node_seed=0, per_round=4, levels=lambda: now)
    high = [next(stream) for _ in range(4)]
    now["sums"] = 0
    low = [next(stream) for _ in range(2)]
    assert {terms(example) for example in high} == {4} and {terms(example) for example in low} == {2}
    assert [redraw(theirs, example.key) for example in (*high, *low)] == [*high, *low]
    assert {terms(example) for example, _ in zip(task.examples(0), range(6), strict=False)} == {2, 3, 4}


def test_a_round_that_was_begun_goes_on_at_its_level(gym: None) -> None:
    task = load_task("reasoning-gym:sums?curriculum=true")
    begun = ExampleStream([task], 0, 4, levels=lambda: {"sums": 1})
    first = next(begun)
    again = ExampleStream([task], 0, 4, begun.place, levels=lambda: {"sums": 2})
    rest = [next(again) for _ in range(4)]
    assert [terms(example) for example in (first, *rest)] == [3, 3, 3, 3, 4]


def test_what_has_no_curriculum_is_told(gym: None) -> None:
    for spec, complaint in [
        ("flat?curriculum=true", "no curriculum"),
        ("sums?curriculum=true&level=1", "level"),
    ]:
        with pytest.raises(TaskError, match=complaint):
            load_task(f"reasoning-gym:{spec}")
