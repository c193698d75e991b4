"""A file of tests stays in one process, whatever versions of pytest and of pytest-xdist meet."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.whole_files import unit_of


class Process:
    """One of the processes of a run: it does as it is told, and keeps in mind what."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.told: list[int] = []
        self.done = 0

    def send_runtest_some(self, indices: list[int]) -> None:
        self.told += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class Config:
    def __init__(self) -> None:
        self.option = SimpleNamespace(loadscopereorder=True)

    def getvalue(self, name: str) -> Any:
        return {"tx": ["popen", "popen"], "dist": "loadgroup"}[name]


def scheduler_of(request: pytest.FixtureRequest, collection: list[str], processes: list[Any]) -> Any:
    """A scheduler that has just begun."""
    scheduler = request.config.pluginmanager.hook.pytest_xdist_make_scheduler(config=Config(), log=None)
    enter(scheduler, collection, processes)
    return scheduler


def enter(scheduler: Any, collection: list[str], processes: list[Any]) -> None:
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, collection)
    scheduler.schedule()


def run(scheduler: Any, processes: list[Any], fatal: int | None = None) -> None:
    """Runs tests, in turn, to the end of all, or until a process is at the one that is fatal. Each begins one
    only when it knows what comes next."""
    ran = True
    while ran:
        ran = False
        for process in processes:
            if len(process.told) - process.done >= (1 if process.shutting_down else 2):
                if process.told[process.done] == fatal:
                    return
                scheduler.mark_test_complete(process, process.told[process.done])
                process.done += 1
                ran = True


def test_a_file_stays_whole_and_files_come_in_the_order_of_the_folders(
    request: pytest.FixtureRequest,
) -> None:
    numbers = {"contracts/test_few": 2, "swarm/test_one": 1, "unit/test_many": 9, "unit/test_last": 3}
    collection = [f"tests/{path}.py::test_{n}[a::b]" for path, most in numbers.items() for n in range(most)]
    processes: list[Any] = [Process("gw0"), Process("gw1")]
    scheduler = scheduler_of(request, collection, processes)
    run(scheduler, processes)
    one, other = (process.told for process in processes)
    assert sorted(one + other) == list(range(len(collection)))
    assert one == sorted(one) and other == sorted(other)
    assert not {unit_of(collection[index]) for index in one} & {unit_of(collection[index]) for index in other}


@pytest.mark.parametrize("fatal", range(8))
def test_what_a_process_that_died_left_is_run_once_by_others_and_not_the_test_that_it_died_of(
    request: pytest.FixtureRequest, fatal: int
) -> None:
    numbers = {"contracts/test_few": 2, "swarm/test_one": 1, "unit/test_many": 4, "unit/test_last": 1}
    collection = [f"tests/{path}.py::test_{n}" for path, most in numbers.items() for n in range(most)]
    processes: list[Any] = [Process("gw0"), Process("gw1")]
    scheduler = scheduler_of(request, collection, processes)
    run(scheduler, processes, fatal)
    [dead] = [process for process in processes if process.told[process.done : process.done + 1] == [fatal]]
    assert scheduler.remove_node(dead) == collection[fatal]
    alive = [process for process in processes if process is not dead] + [Process("gw2")]
    enter(scheduler, collection, alive[1:])
    run(scheduler, alive)
    ran = [index for process in (dead, *alive) for index in process.told[: process.done]]
    assert sorted([*ran, fatal]) == list(range(len(collection)))
    assert scheduler.tests_finished


def test_tests_of_the_vllm_engine_share_a_process_and_attacks_on_real_nodes_do() -> None:
    assert unit_of("tests/contracts/test_vllm.py::test_a") == unit_of(
        "tests/contracts/test_engine.py::test_b"
    )
    assert unit_of("tests/hostile/test_bodies.py::test_a") == unit_of("tests/hostile/test_gossip.py::test_b")
    assert unit_of("tests/unit/test_api.py::test_a") != unit_of("tests/unit/test_chat.py::test_b")
