"""Which tests `make test` keeps together in one of its processes, and in what order they come.

pytest-xdist -> conftest.py's hook -> [WholeFiles] -> the processes

The groups of pytest-xdist itself are not used: they stand in a test's node id, which pytest 9.2 lets nobody
write to, and then each test comes alone, without a word.
"""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ENGINES = ("test_engine.py", "test_vllm.py")
"""These share one vLLM engine, which takes tens of seconds to start."""


class WholeFiles(LoadScopeScheduling):
    """Keeps a file whole, so that its fixtures are made once. Files come in the order of the folders: those
    with real processes have few tests, and by number they would all come last."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False
        super().schedule()
        # A process begins a test once it has the next one, or knows that there is none.
        for node in self.nodes:
            self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test that a process died of, if it did. Others run what it left, but not that one,
        which would end them as well, and no units that are done, for which nobody would ever answer."""
        died_of = None
        for name, unit in list(self.assigned_work[node].items()):
            left = [test for test, is_done in unit.items() if not is_done]
            if left and died_of is None:
                died_of = left.pop(0)
                unit[died_of] = True
            if not left:
                del self.assigned_work[node][name]
        super().remove_node(node)
        return died_of


def unit_of(nodeid: str) -> str:
    """Returns the unit of a test: its tests run in one process, one after the other. Attacks on real nodes
    are one, since each keeps several processes busy."""
    path = PurePosixPath(nodeid.partition("::")[0])
    if path.name in ENGINES:
        return "engines"
    return "hostile" if path.parent.name == "hostile" else str(path)
