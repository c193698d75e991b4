"""A package index on loopback that hands out metadata, so that a resolver need not download whole wheels.

install_check.py -> pip --index-url <- [metadata_index] <- the default index

Pages are those of the index behind it, less the files for other platforms. Where that one keeps no metadata
beside its wheels, they are cut out of the wheel by range requests: some kilobytes of half a gigabyte. A view
may add torch's CPU build, which the default index does not carry: it stands in by its metadata alone (those
of the ordinary build without the packages for CUDA), enough for a resolver.
"""

import io
import json
import platform
import re
import ssl
import sys
import threading
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 60
PREFETCHES = 16
FAILURES = (OSError, LookupError, ValueError, StopIteration, zipfile.BadZipFile)
"""What goes wrong with an index, or with a file that is no wheel."""

PAGE_TYPE = "application/vnd.pypi.simple.v1+json"
TAIL_BYTES = 1 << 17
MAX_DIRECTORY_BYTES = 1 << 24
"""No wheel has a longer table of contents; torch has 1.5 MB."""
OWN_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
CUDA_ONLY = re.compile(r"Requires-Dist: (cuda|nvidia|triton)")


@dataclass(frozen=True)
class View:
    """What an index shows below `/<name of the view>/`."""

    has_cpu_torch: bool = False
    resolved: Mapping[str, "Resolved"] = field(default_factory=dict)
    """Projects that have one version only here: metadata of what pip has resolved before."""

    is_closed: bool = False
    """Whether there is nothing but what is resolved."""


@dataclass(frozen=True)
class Resolved:
    """One package of a resolution, as pip's report gives it."""

    name: str
    version: str
    is_wheel: bool
    metadata: bytes

    @property
    def filename(self) -> str:
        """The name of a wheel with these metadata."""
        return f"{re.sub('[-_.]+', '_', self.name)}-{self.version}-py3-none-any.whl"


class MetadataIndex:
    """Pages and metadata of one index, each asked for once."""

    def __init__(self, upstream: str, torch: str) -> None:
        self.upstream = upstream.rstrip("/")
        self.torch_cpu = f"torch-{torch}+cpu-py3-none-any.whl"
        self.torch = torch
        self.views = {"simple": View(), "cpu": View(has_cpu_torch=True)}
        self.fetched_bytes = 0
        self.handed_on: dict[str, int] = {}
        """Bytes of the files that pip wanted whole, and was sent to the index behind this one for."""
        # One TLS context for all requests: to load the certificates takes longer than most answers.
        https = urllib.request.HTTPSHandler(context=ssl.create_default_context())
        self._opener = urllib.request.build_opener(https)
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[threading.Lock, list[bytes]]] = {}

    def page(self, view_name: str, name: str, here: str) -> bytes | None:
        """The page of a project, its wheels rewritten to come from `here`, which has their metadata."""
        view = self.views[view_name]
        if (found := view.resolved.get(name)) is not None:
            entry = {"filename": found.filename, "hashes": {}, "core-metadata": True}
            files = [{**entry, "url": f"{here}/resolved/{view_name}/{name}/{found.filename}"}]
            return json.dumps({"meta": {"api-version": "1.0"}, "name": name, "files": files}).encode()
        if view.is_closed:
            return None
        has_cpu_torch = view.has_cpu_torch and name == "torch"
        key = f"page {has_cpu_torch} {name}"
        return self._once(key, lambda _: self._rewritten(name, has_cpu_torch, here))

    def prefetch(self, pins: Mapping[str, str], here: str) -> None:
        """Fetch what pip is going to ask for, many at once: it asks for one after the other.

        What fails here is fetched again when pip asks, and fails in its words.
        """

        def fetch(name: str) -> None:
            with suppress(*FAILURES):
                for entry in json.loads(self.page("simple", name, here) or b"{}")["files"]:
                    if entry["filename"].endswith(".whl") and f"-{pins[name]}-" in entry["filename"]:
                        flag, _, address = entry["url"].removeprefix(f"{here}/file/").partition("/")
                        self.metadata(address.replace("/", "://", 1), flag == "1")

        with ThreadPoolExecutor(PREFETCHES) as pool:
            list(pool.map(fetch, pins))

    def _rewritten(self, name: str, has_cpu_torch: bool, here: str) -> bytes:
        page = json.loads(self._once(f"{self.upstream}/{name}/", self._get))
        page["files"] = [entry for entry in page["files"] if may_suit(entry["filename"])]
        for entry in page["files"]:
            if entry["filename"].endswith(".whl"):
                flag = "1" if entry.get("core-metadata") else "0"
                entry["url"] = f"{here}/file/{flag}/{entry['url'].replace('://', '/', 1)}"
                entry["core-metadata"] = True
        if has_cpu_torch:
            prefix = f"torch-{self.torch}-"
            ordinary = next(e["url"] for e in page["files"] if e["filename"].startswith(prefix))
            url = ordinary.replace("/file/", "/cpu-file/", 1)
            stand_in = {"filename": self.torch_cpu, "hashes": {}, "core-metadata": True}
            # Before the name stands the ordinary wheel's address: its metadata are what these are made of.
            page["files"].append({**stand_in, "url": f"{url}/{self.torch_cpu}"})
        return json.dumps(page).encode()

    def metadata(self, url: str, is_beside: bool) -> bytes:
        """METADATA of a wheel, from the file beside it if the index has one, else from the wheel itself."""
        if is_beside:
            return self._once(url + ".metadata", self._get)
        return self._once(url, self._cut_out)

    def _once(self, key: str, fetch: Callable[[str], bytes]) -> bytes:
        with self._lock:
            lock, kept = self._kept.setdefault(key, (threading.Lock(), []))
        with lock:
            if not kept:
                kept.append(fetch(key))
            return kept[0]

    def _get(self, url: str, byte_range: str | None = None) -> bytes:
        headers = {"Accept": PAGE_TYPE + ", */*;q=0.1"} | (
            {"Range": f"bytes={byte_range}"} if byte_range else {}
        )
        request = urllib.request.Request(url, headers=headers)
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            if byte_range and answer.status != 206:
                raise OSError("the index answers no range requests")
            body = answer.read()
        self.fetched_bytes += len(body)
        return body

    def _cut_out(self, url: str) -> bytes:
        wheel = Tail(self._get(url, f"-{TAIL_BYTES}"))
        if (missing := wheel.missing_bytes()) > 0:
            wheel = Tail(self._get(url, f"-{min(TAIL_BYTES + missing, MAX_DIRECTORY_BYTES)}"))
        with zipfile.ZipFile(wheel) as archive:
            info = next(i for i in archive.infolist() if OWN_METADATA.fullmatch(i.filename))
            # `header_offset` counts from the start of what we have, and is negative for what we have not.
            if info.header_offset >= 0:
                return archive.read(info)
        start = info.header_offset - wheel.size
        length = 30 + len(info.filename) + 1024 + info.compress_size
        # A suffix range would fetch all that follows; the length of the whole file makes it an ordinary one.
        total = self.length(url)
        part = self._get(url, f"{total + start}-{total + start + length}")
        return unpack(part, info)

    def length(self, url: str) -> int:
        """How many bytes a file has, without fetching it."""
        request = urllib.request.Request(url, method="HEAD")
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            return int(answer.headers["Content-Length"])


class Tail(io.BytesIO):
    """The last bytes of a zip file. zipfile takes what is missing before them for a prefix cut off."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.size = len(content)

    def missing_bytes(self) -> int:
        """How many more bytes the table of contents needs."""
        end = self.getvalue().rfind(b"PK\5\6")
        return int.from_bytes(self.getvalue()[end + 12 : end + 16], "little") - end


def may_suit(filename: str) -> bool:
    """Whether a Python we support may install a file on this machine. Long pages cost pip most of its time.

    >>> may_suit("x-1.0.tar.gz"), may_suit("x-1.0-py3-none-any.whl"), may_suit("x-1.0-cp38-cp38-win32.whl")
    (True, True, False)
    """
    if not filename.endswith(".whl"):
        return filename.endswith(".tar.gz")
    python, abi, tags = filename.removesuffix(".whl").split("-")[-3:]
    if re.search(r"cp3(?:[0-9]|10)(?![0-9])", python) and abi != "abi3":
        return False
    if sys.platform != "linux" or tags == "any":
        return True
    return platform.machine() in tags and "musllinux" not in tags


def unpack(part: bytes, info: zipfile.ZipInfo) -> bytes:
    """One member of a zip file, from bytes that start with its local header."""
    start = 30 + int.from_bytes(part[26:28], "little") + int.from_bytes(part[28:30], "little")
    body = part[start : start + info.compress_size]
    return body if info.compress_type == zipfile.ZIP_STORED else zlib.decompress(body, -15)


def as_cpu_build(metadata: bytes, torch: str) -> bytes:
    """Metadata of torch's CPU build, from those of the ordinary one."""
    lines = [line for line in metadata.decode().splitlines() if not CUDA_ONLY.match(line)]
    return "\n".join(f"Version: {torch}+cpu" if li.startswith("Version: ") else li for li in lines).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: MetadataIndex

    def do_GET(self) -> None:
        kind, _, rest = self.path.partition("?")[0].strip("/").partition("/")
        try:
            if kind in self.index.views:
                page = self.index.page(kind, rest.strip("/"), f"http://{self.headers['Host']}")
                self._answer(404 if page is None else 200, page or b"", PAGE_TYPE)
                return
            if kind == "resolved":
                view_name, name, _ = rest.split("/")
                self._answer(200, self.index.views[view_name].resolved[name].metadata, "text/plain")
                return
            flag, scheme, address = rest.split("/", 2)
            url = f"{scheme}://{address}"
            if not url.endswith(".metadata"):
                self.index.handed_on[url.rsplit("/", 1)[1]] = self.index.length(url)
                self._answer(302, b"", "text/plain", Location=url)
            elif kind == "cpu-file":
                found = self.index.metadata(url.rsplit("/", 1)[0], flag == "1")
                self._answer(200, as_cpu_build(found, self.index.torch), "text/plain")
            else:
                found = self.index.metadata(url.removesuffix(".metadata"), flag == "1")
                self._answer(200, found, "text/plain")
        except urllib.error.HTTPError as error:
            self._answer(error.code, b"", "text/plain")
        except FAILURES as error:
            self._answer(502, repr(error).encode(), "text/plain")

    def _answer(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


@contextmanager
def serving(index: MetadataIndex) -> Iterator[str]:
    """Serve an index on loopback. Yields its address."""
    handler = type("BoundHandler", (Handler,), {"index": index})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
