"""A model hub on loopback: as much of its API as `export --push` and `pull` use."""

import base64
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_only_this_one_may_write"
COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """Its repositories, and what it was asked with."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    breaks_with: str = ""
    """What it says instead of answering."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that it claims."""
    url: str = ""

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
        self.asked.append(f"{method} {path}")
        if self.breaks_with:
            return 400, {"error": self.breaks_with}
        if method == "POST" and token != TOKEN:
            return 401, {"error": f"not with {token}"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repos:
                return 409, {"error": "there is one", "url": f"{self.url}/{name}"}
            self.repos[name], self.private[name] = {}, asked.get("visibility") == "private"
            return 200, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        found = re.match(r"(?:/api/models)?/([^/]+/[^/]+)(?:/(.*))?", path)
        assert found is not None, path
        return self.of_repo(method, found[1], found[2] or "", body)

    def of_repo(self, method: str, name: str, rest: str, body: bytes) -> tuple[int, Any]:
        if (files := self.repos.get(name)) is None:
            return 404, {"error": "no such repository"}
        if rest.startswith("preupload/"):
            asked = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            return 200, {"files": modes}
        if rest.startswith("commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"{self.url}/{name}/commit/{COMMIT}"
            return 200, {"commitUrl": address, "commitOid": COMMIT, "success": True}
        if rest.startswith("resolve/"):
            content = files.get(rest.split("/", 2)[2])
            return (404, {"error": "no such file"}) if content is None else (200, content)
        siblings = [
            {"rfilename": path, "size": self.sizes.get(path, len(data))} for path, data in files.items()
        ]
        return 200, {
            "id": name, "modelId": name, "sha": COMMIT, "private": self.private[name], "siblings": siblings,
            "tags": [], "downloads": 0, "likes": 0, "createdAt": "2026-11-26T00:00:00.000Z",
        }  # fmt: skip


@contextmanager
def fake_hub() -> Generator[FakeHub]:
    """Runs a hub. It is asked where HF_ENDPOINT says so."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            code, found = hub.answer(self.command, self.path.partition("?")[0], body, token)
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{len(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = do

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
