"""Tools of a Model Context Protocol server on this machine, which is a program that we start and talk to.

task file: tools = mcp("command", "argument") -> [McpServer] -> stdin, stdout of the program -> Tool

One JSON object a line, as the protocol's stdio transport has it; of the protocol only what tools need:
initialize, tools/list, tools/call. Requests of the server are refused and its notifications passed over. The
program is started with the file, and ends with the process that runs it. What it answers may depend on
anything, so a task with such tools stays at home unless its file says `exchangeable = True`.
"""

import atexit
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from swarmnode.errors import TaskError
from swarmnode.extensions.environments.tools import Tool

PROTOCOL_VERSION = "2025-06-18"
"""Revision of the protocol that we ask for. A server with an older one says so; tools are the same in it."""

CALL_TIMEOUT_S = 60.0
"""Longest wait for one answer. The process that asks has a deadline of its own besides."""

MAX_LINE_BYTES = 4 << 20
"""The longest message of a server."""

MAX_PAGES = 16
"""Pages of a list of tools."""

INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
"""Environment variables that a server gets, as with the protocol's own SDK. None of them holds a key."""

_METHOD_NOT_FOUND = -32601


def mcp(
    command: str, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = CALL_TIMEOUT_S
) -> list[Tool]:
    """Returns the tools of a server that is started by this command. `env`: variables that it gets besides
    those that every program needs (INHERITED), such as an API key. Raises TaskError.

    >>> tools = mcp("uvx", "mcp-server-time")  # doctest: +SKIP
    """
    server = McpServer((command, *arguments), timeout_s, env or {})
    return [_tool(server, described) for described in server.tools()]


class McpServer:
    """A server's program, running."""

    def __init__(
        self, command: tuple[str, ...], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts the server. Raises TaskError."""
        self.name = os.path.basename(command[0])
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._serial = 0
        self._unread = b""
        ours = os.environ  # noqa: TID251  handed on, and not read
        given = {name: ours[name] for name in INHERITED if name in ours} | dict(env or {})
        try:
            self._program = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=given
            )
        except OSError as error:
            hint = "check that it is installed and on the PATH of the node"
            raise TaskError(f"{command[0]} cannot be started: {error.strerror}", hint=hint) from error
        atexit.register(self.close)
        client = {"name": "swarmnode", "version": "0"}
        self._ask(
            "initialize", {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": client}
        )
        self._send({"method": "notifications/initialized"})

    def tools(self) -> list[dict[str, Any]]:
        """Returns the server's descriptions of its tools. Raises TaskError."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = self._ask("tools/list", cursor)
            found += [one for one in page.get("tools", ()) if isinstance(one, dict) and "name" in one]
            if not page.get("nextCursor"):
                return found
            cursor = {"cursor": page["nextCursor"]}
        return found

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool and returns its text. Raises TaskError, with the tool's words if it failed."""
        result = self._ask("tools/call", {"name": name, "arguments": arguments})
        text = "\n".join(map(_shown, cast(list[Any], result.get("content") or ())))
        if not text and "structuredContent" in result:
            text = json.dumps(result["structuredContent"], ensure_ascii=False)
        if result.get("isError"):
            raise TaskError(text or f"{name} failed")
        return text

    def close(self) -> None:
        """Ends the program."""
        self._program.kill()
        with suppress(OSError, subprocess.TimeoutExpired):
            self._program.wait(1.0)
            for pipe in (self._program.stdout, self._program.stdin):
                assert pipe is not None
                pipe.close()

    def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            self._serial += 1
            serial, deadline = self._serial, time.monotonic() + self._timeout_s
            self._send({"id": serial, "method": method, "params": parameters})
            while True:
                message = self._received(deadline, method)
                if "method" in message and "id" in message:
                    refusal = {"code": _METHOD_NOT_FOUND, "message": "this client only calls tools"}
                    self._send({"id": message["id"], "error": refusal})
                elif message.get("id") == serial:
                    break
        if isinstance(message.get("result"), dict):
            return cast(dict[str, Any], message["result"])
        told = cast(dict[str, Any], message.get("error") or {}).get("message", "no result")
        raise TaskError(f"{self.name} refused {method}: {told}")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._program.stdin is not None
        try:
            self._program.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            self._program.stdin.flush()
        except OSError as error:
            raise self._gone() from error

    def _received(self, deadline: float, method: str) -> dict[str, Any]:
        assert self._program.stdout is not None
        source = self._program.stdout.fileno()
        while b"\n" not in self._unread:
            if len(self._unread) > MAX_LINE_BYTES:
                raise TaskError(f"{self.name} answered {method} with more than {MAX_LINE_BYTES} bytes")
            if not _readable(source, max(0.0, deadline - time.monotonic())):
                raise TaskError(f"{self.name} did not answer {method} within {self._timeout_s:g} s")
            data = os.read(source, 1 << 16)
            if not data:
                raise self._gone()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return {}  # a line that a program prints by mistake
        return cast(dict[str, Any], message) if isinstance(message, dict) else {}

    def _gone(self) -> TaskError:
        return TaskError(f"{self.name} is no longer running", hint="start it by hand to see what it says")


def _readable(source: int, timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def _tool(server: McpServer, described: dict[str, Any]) -> Tool:
    name = str(described["name"])
    function: dict[str, Any] = {
        "name": name,
        "description": str(described.get("description") or name),
        "parameters": described.get("inputSchema") or {"type": "object", "properties": {}},
    }

    def call(**arguments: Any) -> str:
        return server.call(name, arguments)

    return Tool(name, {"type": "function", "function": function}, call)


def _shown(content: Any) -> str:
    match content:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case {"type": str(kind)}:
            return f"[{kind}]"
        case _:
            return ""
