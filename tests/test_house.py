"""Two habits that a reader relies on: one meaning a word, and errors that propagate (AGENTS.md, 2)."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "swarmnode"


def public_classes(source: str) -> list[str]:
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def test_private_classes_and_those_within_others_do_not_count() -> None:
    source = "class Peer:\n    class Meta: ...\nclass _Peer: ...\ndef make():\n    class Local: ..."
    assert public_classes(source) == ["Peer"]


def test_no_public_class_name_is_defined_twice() -> None:
    files_of: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in public_classes(path.read_text()):
            files_of[name].append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}


CODE_OF_OTHERS = {
    "registry.py",
    "model/base_model.py",
    "node/showing/monitors.py",
    "extensions/sandbox/confinement/launch.py",
    "extensions/limits/machine_guard.py",
    "tasks/deadlines/daemon_threads.py",
    "extensions/environments/episodes.py",
    "extensions/environments/gym_task.py",
    "tasks/kinds/imported.py",
    "extensions/suites/remote_calls.py",
    "tasks/judging/rewards.py",
    "tasks/source_file.py",
    "tasks/file_task.py",
    "extensions/environments/taskset_task.py",
    "tasks/processes/worker.py",
}
BYTES_OF_PEERS = {
    "exchange/bodies/fetcher.py",
    "exchange/bodies/holder.py",
    "exchange/library/borrower.py",
    "exchange/gossip/header_gossip.py",
    "network/rpc.py",
    "network/streams.py",
    "extensions/pipeline/membership/job_runner.py",
    "extensions/pipeline/execution/relay.py",
    "extensions/pipeline/wire/incoming_streams.py",
}
ENDS = {"node/workers.py", "cli/app.py"}
RAISED_ELSEWHERE = {"rollout/fair_lock.py"}
BROAD = {"Exception", "BaseException"}


def catches_all(source: str) -> list[int]:
    """Lines of the handlers of any error that do not end by raising it again."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not raises_again(node)
    ]


def is_broad(caught: ast.expr | None) -> bool:
    return caught is None or any(isinstance(name, ast.Name) and name.id in BROAD for name in ast.walk(caught))


def raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_cleaning_up_and_raising_again_is_no_broad_except() -> None:
    source = "try: ...\nexcept BaseException:\n    close()\n    raise\n"
    assert catches_all(source) == []
    assert catches_all(source.replace("raise", "raise Other from None")) == [2]
    assert catches_all(
        source.replace("BaseException", "(Exception, SystemExit)").replace("raise", "...")
    ) == [2]


def test_any_error_is_caught_only_where_the_habits_say() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {name for name, source in sources.items() if catches_all(source)}
    assert found == CODE_OF_OTHERS | BYTES_OF_PEERS | ENDS | RAISED_ELSEWHERE
