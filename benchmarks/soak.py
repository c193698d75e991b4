"""A week of a node in minutes: what it loses when everything happens to it that happens in a week.

    python benchmarks/soak.py [--quick] [--json FILE]

Three `swarmnode join` processes train on loopback: one that is disturbed, one with its settings and its seed
that is not, and a peer of both. Every few rounds comes the next of these: SIGKILL of the node, of its network
daemon, of its task process; a full disk; a clock that steps an hour ahead, and back; a network that is cut (a
daemon that is stopped); pause and resume; an upgrade (the node is stopped, and another version goes on).

- `rounds_lost`: rounds of the newest checkpoint that the next life did not begin with, all lives together.
- `identities_lost`: lives with another peer id than the first.
- `reward_vs_undisturbed`: held-out reward at the end, less that of the undisturbed one.
- `memory_growth_mb`: the most that the disturbed node or the undisturbed one ever had with its children,
  above the undisturbed one's first rounds.

It ends within ten minutes; what there was no time for, or no right to do, is in `left_out`. The full disk
needs root, for a small tmpfs.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
from common import MODELS, TimeIsOver, arguments, at_most, elapsed_s, report

sys.path.insert(0, str(Path(__file__).parents[1]))
from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.node.building.page_client import ask_page
from tests.joined_node import JoinedNode
from tests.warm_start import WarmStart

MIB = 2**20
OPTIONS = ("--preset", "tiny", "--set", "network.listen=127.0.0.1", "--set", "node.checkpoint_every=2")
ROUNDS, QUICK_ROUNDS = 200, 60
EVERY = 5
"""Rounds from one disturbance to the next."""
FIRST_ROUNDS = 10
"""Rounds after which a node has the memory that it needs."""
AN_HOUR_S = 3600
DISK_MIB = 64
CUT_S = 3.0
OVER_AFTER_S = 560.0
LIFE = str(Path(__file__).with_name("soak_life.py"))
TASK = """
import random

def examples(seed):
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choices("abcdefghij", k=3))
        yield {"prompt": f"rev {word}=", "answer": word[::-1]}

def reward(completions, answer, **columns):
    return [sum(a == b for a, b in zip(text, right)) / 3 for text, right in zip(completions, answer)]
"""


class Soaked:
    """The disturbed node, over its lives."""

    def __init__(self, folder: Path, start: Callable[..., JoinedNode]) -> None:
        self.home, self._clock = folder / "home", folder / "clock"
        self._clock.touch()
        self._start = start
        self._version = 0
        self._peers: set[str] = set()
        self.rounds_lost = 0
        self.done: Counter[str] = Counter()
        self.disk: Path | None = None
        self.begin()

    def begin(self, *, cold: bool = False) -> int:
        """Starts a life. Returns the round that it begins after."""
        prefix = (LIFE, str(self._clock), f"0.1.{self._version}")
        self.node = self._start(self.home, prefix=(sys.executable, *prefix) if cold else prefix, cold=cold)
        self.node.until(lambda: self.round > 0)
        self._peers.add(self.node.status()["peer_id"])
        resumed = re.search(r"resumed after round (\d+)", self.node.story)
        return int(resumed[1]) if resumed else 0

    @property
    def identities_lost(self) -> int:
        return len(self._peers) - 1

    @property
    def round(self) -> int:
        return self.node.status()["progress"]["round"]

    @property
    def saved(self) -> int:
        """The round of the newest checkpoint."""
        found = self.node.paths.checkpoints.glob("*/round-*/state.json")
        return max((int(path.parent.name.removeprefix("round-")) for path in found), default=0)

    def go_on(self, rounds: int = EVERY) -> None:
        self.node.until_round(self.round + rounds)

    # What happens in a week.

    def killed(self) -> None:
        saved = self.saved
        self.node.vanish()
        self.rounds_lost += max(0, saved - self.begin())

    def daemon_killed(self) -> None:
        restarts = self.node.status()["network"]["restarts"]
        self.node.daemon().kill()
        self.node.until(lambda: self.node.status()["network"]["restarts"] > restarts)

    def task_killed(self) -> None:
        children = psutil.Process(self.node.process.pid).children(recursive=True)
        tasks = [child for child in children if child.name() != "p2pd"]
        assert tasks, "a task file has a process of its own"
        for child in tasks:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self.go_on(1)

    def disk_full(self) -> None:
        assert self.disk is not None
        filler, known = self.disk / "filler", os.statvfs(self.disk)
        with suppress(OSError):  # The node writes meanwhile.
            filler.write_bytes(b"x" * max(0, known.f_bavail * known.f_frsize - 60_000))
        saved = self.saved
        self.go_on()
        assert self.saved >= saved, "what was saved is there"
        filler.unlink()
        self.go_on()

    def clock_stepped(self) -> None:
        for seconds in (AN_HOUR_S, 0):
            os.truncate(self._clock, seconds)
            self.go_on()

    def network_cut(self) -> None:
        daemon = self.node.daemon()
        daemon.send_signal(signal.SIGSTOP)
        time.sleep(CUT_S)
        # Where the node took it for dead, another one runs by now.
        with suppress(psutil.NoSuchProcess):
            daemon.send_signal(signal.SIGCONT)
        self.node.until(lambda: self.node.status()["network"]["state"] == "up")

    def paused(self) -> None:
        self._ask("pause")
        self.node.until(lambda: self.node.status()["phase"]["name"] == "paused")
        self._ask("resume")

    def upgraded(self) -> None:
        self._ask("stop")
        assert self.node.wait() == 0, self.node.story
        saved = self.saved
        self._version += 1
        self.rounds_lost += max(0, saved - self.begin(cold=True))
        assert self.node.status()["version"] == f"0.1.{self._version}"

    def _ask(self, request: str) -> None:
        ask_page(self.node.running(), "/control", self.node.paths, {"request": request, "for_s": None})

    def through(self, rounds: int) -> None:
        """Everything in turn, until so many rounds are done."""
        week = [self.killed, self.daemon_killed, self.task_killed, self.disk_full,
                self.clock_stepped, self.network_cut, self.paused, self.upgraded]  # fmt: skip
        if self.disk is None:
            week.remove(self.disk_full)
        self.go_on()
        while self.round < rounds - 4 * EVERY:
            happens = week[self.done.total() % len(week)]
            began_s, round = elapsed_s(), self.round
            happens()
            self.done[happens.__name__] += 1
            took_s = elapsed_s() - began_s
            self.go_on()
            print(
                f"round {round}: {happens.__name__}, {took_s:.1f} s, {memory_mib(self.node)} MiB", flush=True
            )


class Memory:
    """The memory of nodes and their children, looked at all the time."""

    def __init__(self) -> None:
        self.peaks: Counter[str] = Counter()
        self._over = threading.Event()

    @contextmanager
    def watched(self, nodes: Callable[[], dict[str, JoinedNode]]) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, args=(nodes,))
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self, nodes: Callable[[], dict[str, JoinedNode]]) -> None:
        while not self._over.wait(0.5):
            for name, node in nodes().items():
                self.peaks[name] = max(self.peaks[name], memory_mib(node))


def memory_mib(node: JoinedNode) -> int:
    """Of a node and its children; 0: it has ended."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(node.process.pid)
        total = process.memory_info().rss
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                # Until it has begun its program, a child shows the memory of its parent.
                total += child.memory_info().rss if child.cmdline() != process.cmdline() else 0
    return total // MIB


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of its own at a folder. None: this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def soak(folder: Path, rounds: int, found: dict[str, float], left_out: list[str]) -> Counter[str]:
    """Measures everything into `found`. Returns how often what was done."""
    model, task = str(build_tiny(MODELS)), folder / "backwards.py"
    task.write_text(TASK)
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk"))
        warm = stack.enter_context(closing(WarmStart()))
        tasks = ("--task", "rev", "--task", "sort", "--task", str(task))

        def start(
            home: Path, *arguments: str, prefix: tuple[str, ...] = (), cold: bool = False
        ) -> JoinedNode:
            options = ("--model", model, *OPTIONS, *tasks, *arguments)
            node = JoinedNode(home, *options, prefix=prefix, warm=None if cold else warm)
            stack.callback(node.end)
            return node

        peer = start(folder / "peer", "--seed", "2")
        address = peer.running().addresses[0]
        same = (address, "--seed", "1", "--rounds", str(rounds))
        # As an upgraded one is: what begins warm shows less of the libraries as its memory.
        calm = start(folder / "calm", *same, cold=True)
        calm.until_round(FIRST_ROUNDS)
        first_mib = memory_mib(calm)
        soaked = Soaked(folder / "disk", lambda home, **more: start(home, *same, **more))
        soaked.disk = disk
        if disk is None:
            left_out.append("a full disk: mounting a tmpfs needs root")
        memory = Memory()
        with memory.watched(lambda: {"calm": calm, "soaked": soaked.node}):
            try:
                soaked.through(rounds)
                rewards = [node.summary()["reward_last"] for node in (soaked.node, calm)]
                found["reward_vs_undisturbed"] = rewards[0] - rewards[1]
                print(f"held-out reward {rewards[0]:.3f}, undisturbed {rewards[1]:.3f}")
            except (AssertionError, OSError):
                with suppress(subprocess.TimeoutExpired):
                    soaked.node.wait(15)
                code, story = soaked.node.process.poll(), soaked.node.story[-4000:]
                print(f"the node ended with {code} and said:\n{story}", file=sys.stderr)
                raise
            finally:
                found["rounds_lost"] = soaked.rounds_lost
                found["identities_lost"] = soaked.identities_lost
                found["memory_growth_mb"] = max(memory.peaks.values()) - first_mib
                print(f"memory: {first_mib} MiB first, at most {dict(memory.peaks)}")
        return soaked.done


def main() -> None:
    options = arguments("what a node loses in a week of deaths, full disks, cuts and upgrades")
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    found: dict[str, float] = {}
    left_out: list[str] = []
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="swarmnode-soak-") as name:
        try:
            with at_most(OVER_AFTER_S - elapsed_s()):
                done = soak(Path(name), rounds, found, left_out)
        except TimeIsOver:
            left_out.append(f"the rest: {OVER_AFTER_S:.0f} s were over")
    spread = {claim: (value, value) for claim, value in found.items()}
    extra = {"rounds": rounds, "done": done, "left_out": left_out, "seconds": round(elapsed_s())}
    report("soak", found, spread, options.json, extra)


if __name__ == "__main__":
    main()
