"""Looks at the page of three nodes after 30 rounds, as people do: light, dark, on a phone, with the keyboard.

    make page-check [ARGS="--axe axe.min.js --out FOLDER"]

three `swarmnode join` -> page -> chromium -> [page_check.py] -> pictures, errors on the console, keyboard

Needs `chromium`. The pictures are for eyes. `--axe`: the script of axe-core, whose rules are run as well
where somebody has fetched it.
"""

import argparse
import base64
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))
from swarmnode.extensions.demonstration.tiny import build_tiny
from tests.joined_node import JoinedNode
from tests.warm_start import WarmStart

ROUNDS = 30
OPTIONS = ("--preset", "tiny", "--set", "network.listen=127.0.0.1", "--set", "tasks.eval_examples=16")
PATIENCE_S = 60.0
"""Longest wait for the first state of a page and its curves."""
SETTLED_S = 0.5
"""Seconds more in which what is behind them comes, and moves into its place."""
LOOKS = {
    "light": {"width": 1280, "height": 900, "scheme": "light"},
    "dark": {"width": 1280, "height": 900, "scheme": "dark"},
    "phone": {"width": 390, "height": 844, "scheme": "light"},
}
NO_CHROMIUM = "the page was not looked at: there is no chromium here"
CONTROLS = "a[href], button:enabled, input:enabled, select:enabled, summary, [tabindex='0']"
REACHED = f"""
[...document.querySelectorAll("{CONTROLS}")].filter(one => one.checkVisibility() && one.tabIndex >= 0)
    .filter(one => !(window.reached || []).includes(one))
    .map(one => one.outerHTML.slice(0, 100))
"""
SHOWN = """
['#cards strong', '#curve', '#own', '#timeline'].every(one => document.querySelector(one)?.hasChildNodes())
"""
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"
AXE = """
axe.run().then(found => found.violations.map(one =>
    `${one.impact}: ${one.help}: ${one.nodes.slice(0, 5).map(node => node.html.slice(0, 120)).join(" | ")}`))
"""


class Browser:
    """A chromium without a window, told what to do over pipes. `with Browser() as browser:` runs it."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._numbers = count(1)
        self.errors: list[str] = []
        """What the console said was wrong."""
        self._begun = b""

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (reads, told), (said, writes) = os.pipe(), os.pipe()
        # It reads at number 3 and writes at number 4.
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10) for number in (reads, writes)]
        command = [
            *(self._program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"),
        ]
        silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, number, 3 + place) for place, number in enumerate(high)]
        self._pid = os.posix_spawn(self._program, command, os.environ, file_actions=[*silent, *pipes])
        for number in (reads, writes, *high):
            os.close(number)
        self._told, self._said = os.fdopen(told, "wb", buffering=0), os.fdopen(said, "rb")
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for part in ("Page", "Runtime", "Log"):
            self.ask(f"{part}.enable")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._told.close()
        self._said.close()
        self._profile.cleanup()

    def ask(self, method: str, **what: Any) -> dict[str, Any]:
        """Asks the tab."""
        return self._ask(method, self._session, **what)

    def value(self, script: str) -> Any:
        """Returns what a script is, once it is known."""
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def look(self, url: str, width: int, height: int, scheme: str) -> None:
        """Opens a page."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=url)
        self._until(SHOWN, f"{url} shows nothing")
        time.sleep(SETTLED_S)

    def picture(self, *, whole: bool) -> bytes:
        """Returns a PNG of what is seen, or of the whole page."""
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def unreached(self) -> list[str]:
        """Returns the controls that a walk with the tab key does not come to. The page stays at one round."""
        self.value("window.reached = []; document.activeElement.blur(); $('live').checked = false")
        self._until("!reading", "its rollouts are read for ever")
        for _ in range(self.value(f'document.querySelectorAll("{CONTROLS}").length') + 5):
            for kind in ("rawKeyDown", "keyUp"):
                self.ask("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
            self.value("window.reached.push(document.activeElement), null")
        return self.value(REACHED)

    def keeps_focus(self) -> bool:
        """Returns True if a card that the keyboard stands on is still there after the next state."""
        self.value("window.old = state; document.querySelector('.card').focus()")
        self._until("state !== window.old", "no further state comes")
        return self.value("document.activeElement === document.querySelector('.card')")

    def _until(self, script: str, otherwise: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not self.value(script):
            assert time.monotonic() < until_s, f"{otherwise}: {self.errors}"
            time.sleep(0.1)

    def _ask(self, method: str, session: str | None = None, **what: Any) -> dict[str, Any]:
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": what}
        asked |= {"sessionId": session} if session else {}
        self._told.write(json.dumps(asked).encode() + b"\0")
        answer: dict[str, Any] = {}
        while not answer:
            piece = self._said.read1(1 << 20)
            assert piece, f"chromium ended before it answered {method}"
            *whole, self._begun = (self._begun + piece).split(b"\0")
            for said in map(json.loads, whole):
                self._note(said)
                answer = said if said.get("id") == number else answer
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _note(self, said: dict[str, Any]) -> None:
        what = said.get("params", {})
        if said.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(what)[:500])
        if said.get("method") == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")


def find_chromium() -> str | None:
    """Returns the path of the browser. None: there is none here."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def faults(browser: Browser, url: str, out: Path, axe: str | None) -> Iterator[str]:
    """Looks at a page, writes its pictures and yields what is wrong."""
    for name, look in LOOKS.items():
        browser.look(url, **look)  # type: ignore[arg-type]
        (out / f"{name}.png").write_bytes(browser.picture(whole=False))
        (out / f"{name}-whole.png").write_bytes(browser.picture(whole=True))
        yield from (f"{name}: the console says {error}" for error in browser.errors)
        browser.errors.clear()
        yield from (f"{name}: the tab key does not come to {one}" for one in browser.unreached())
        if not browser.keeps_focus():
            yield f"{name}: the next state takes the keyboard from its card"
        if browser.value(WIDER):
            yield f"{name}: the page is wider than its window"
        if axe is not None:
            browser.value(f"{axe};null")
            yield from (f"{name}: axe: {one}" for one in browser.value(AXE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axe", type=Path, metavar="FILE", help="axe.min.js of axe-core")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the pictures go")
    options = parser.parse_args()
    program = find_chromium()
    if program is None:
        sys.exit(NO_CHROMIUM)
    out = options.out or Path(tempfile.mkdtemp(prefix="swarmnode-page-"))
    out.mkdir(parents=True, exist_ok=True)
    axe = None if options.axe is None else options.axe.read_text()
    with tempfile.TemporaryDirectory() as folder, closing(WarmStart()) as warm, ExitStack() as stack:
        model = str(build_tiny(Path.home() / ".cache/swarmnode/models"))
        nodes: list[JoinedNode] = []
        for number in range(3):
            seeds = nodes[0].running().addresses[:1] if nodes else []
            more = (*seeds, "--seed", str(number), "--model", model, *OPTIONS)
            nodes.append(JoinedNode(Path(folder) / f"node{number}", *more, warm=warm))
            stack.callback(nodes[-1].end)
        for node in nodes:
            node.until_round(ROUNDS)
        with Browser(program) as browser:
            found = list(faults(browser, f"http://127.0.0.1:{nodes[1].running().http_port}/", out, axe))
    print("\n".join(found))
    print(f"{len(found)} faults; the pictures are in {out}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
