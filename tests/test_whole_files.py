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

    def send_runtest_some(self, indices: list[int]) -> None:
        self.told += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class Config:
    def __init__(self) -> None:
        self.option = SimpleNamespace(loadscopereorder=True)

    def getvalue(self, name: str) -> Any:
        return {"tx": ["popen", "popen"], "dist": "loadgroup"}[name]


def test_a_file_stays_whole_and_files_come_in_the_order_of_the_folders(
    request: pytest.FixtureRequest,
) -> None:
    numbers = {"contracts/test_few": 2, "swarm/test_one": 1, "unit/test_many": 9, "unit/test_last": 3}
    collection = [f"tests/{path}.py::test_{n}[a::b]" for path, most in numbers.items() for n in range(most)]
    scheduler = request.config.pluginmanager.hook.pytest_xdist_make_scheduler(config=Config(), log=None)
    processes: list[Any] = [Process("gw0"), Process("gw1")]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, collection)
    scheduler.schedule()
    done = [0, 0]
    while any(number < len(process.told) for number, process in zip(done, processes, strict=True)):
        for which, process in enumerate(processes):
            if done[which] < len(process.told):
                scheduler.mark_test_complete(process, process.told[done[which]])
                done[which] += 1
    one, other = (process.told for process in processes)
    assert sorted(one + other) == list(range(len(collection)))
    assert one == sorted(one) and other == sorted(other)
    assert not {unit_of(collection[index]) for index in one} & {unit_of(collection[index]) for index in other}


def test_tests_of_the_vllm_engine_share_a_process_and_attacks_on_real_nodes_do() -> None:
    assert unit_of("tests/contracts/test_vllm.py::test_a") == unit_of(
        "tests/contracts/test_engine.py::test_b"
    )
    assert unit_of("tests/hostile/test_bodies.py::test_a") == unit_of("tests/hostile/test_gossip.py::test_b")
    assert unit_of("tests/unit/test_api.py::test_a") != unit_of("tests/unit/test_chat.py::test_b")
