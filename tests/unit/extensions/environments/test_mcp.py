"""Tools of a server of the Model Context Protocol, which is a program of this machine."""

import json
import os
import resource
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from swarmnode.chat import tools_of
from swarmnode.errors import TaskError
from swarmnode.extensions.environments.mcp import McpServer
from swarmnode.tasks.task import Environment
from tests.unit.extensions.environments.test_environment_task import first, loaded, observed, play

SERVER = """
import json, sys
TOOL = {"name": "halve", "description": "Halves.",
        "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
for line in sys.stdin:
    asked = json.loads(line)
    match asked["method"]:
        case "initialize":
            print("hello")
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        case "tools/list":
            print(json.dumps({"jsonrpc": "2.0", "id": "theirs", "method": "roots/list"}))
            result = {"tools": [TOOL]}
        case "tools/call":
            n = asked["params"]["arguments"]["n"]
            if n == 13:
                sys.exit()
            failed = n % 2 == 1
            text = {"type": "text", "text": "odd" if failed else str(n // 2)}
            result = {"content": [text], "isError": failed}
        case _:
            continue
    if asked.get("id") is not None and "method" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.fixture
def halving(tmp_path: Path) -> Environment:
    (tmp_path / "server.py").write_text(SERVER.replace('asked["method"]', 'asked.get("method")'))
    source = (
        "from swarmnode.extensions.environments.mcp import mcp\n"
        f"tools = mcp({sys.executable!r}, {str(tmp_path / 'server.py')!r})\n"
        "def examples(seed):\n    for n in range(20):\n        yield f'half of {2 * n}?', str(n)\n"
    )
    return loaded(tmp_path, source)


def test_tools_of_a_server_of_this_machine(halving: Environment) -> None:
    example = first(halving)
    assert tools_of(example.prompt)[0]["function"]["name"] == "halve"
    assert not halving.exchangeable
    said = observed(play(halving, example, ["halve: 8", "halve: 7", 'halve("8")', "halve(13)", "halve(2)"]))
    assert said[:3] == ["4", "error: odd", "error: n must be integer"]
    assert said[3].startswith("error:")
    assert "is no longer running" in said[4]


TELLING = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("id") is not None:
        said = {"content": [{"type": "text", "text": json.dumps(dict(os.environ))}]}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""


def test_a_server_sees_of_our_environment_what_programs_need_and_what_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    (tmp_path / "server.py").write_text(TELLING)
    server = McpServer((sys.executable, str(tmp_path / "server.py")), 60.0, {"WEATHER_KEY": "mine"})
    seen = json.loads(server.call("any", {}))
    server.close()
    assert seen["WEATHER_KEY"] == "mine" and seen["PATH"] == os.environ["PATH"]
    assert "JUDGE_KEY" not in seen and "sk-secret" not in str(seen)


def test_a_server_is_heard_by_a_process_with_very_many_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine lets a process open few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    (tmp_path / "server.py").write_text(TELLING)
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while files.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        server = McpServer((sys.executable, str(tmp_path / "server.py")), 60.0)
        files.callback(server.close)
        assert server.call("any", {})


def test_a_server_that_cannot_be_started_is_an_error_of_the_file() -> None:
    from swarmnode.extensions.environments.mcp import mcp

    with pytest.raises(TaskError, match="cannot be started"):
        mcp("no-such-command-of-ours")
