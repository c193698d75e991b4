"""The nodes that attacks.py attacks, and what is read off them: rounds, memory, CPU time, restarts.

attacks.py -> [Swarm] -> `swarmnode join` victim, `swarmnode join` honest -> Window

With two cores or more the victim has one to itself; the honest node and the attackers share another. What an
attack takes from the victim's rounds is then what it makes the victim do or wait for, not the CPU time that
the attacker uses. Rounds are counted with their fractions, from the times in metrics.jsonl.
"""

import json
import os
import shutil
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.joined_node import JoinedNode, serving
from tests.warm_start import WarmStart

MIB = 2**20
SAMPLE_EVERY_S = 0.5
OPTIONS = ("--preset", "tiny", "--set", "network.listen=127.0.0.1", "--set", "tasks.eval_examples=8")
STEADY = ("--set", "node.eval_every=0", "--set", "node.checkpoint_every=20")
"""No evaluations between rounds: they would fall into some windows and not into others. All else is the
preset as it is shipped, with 16 groups of others wanted a round: under the rule `book` nobody's groups are
trained on as they are, so the pace of rounds hardly depends on who is heard."""


def on_core(number: int) -> tuple[str, ...]:
    """The command that keeps a process and its children on one core; empty where there is no choice."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2 or shutil.which("taskset") is None:
        return ()
    return ("taskset", "-c", str(cores[number]))


VICTIMS_CORE = on_core(0)
OTHERS_CORE = on_core(1)
ATTACKERS_PREFIX = (*OTHERS_CORE, "nice", "-n", "5")


@dataclass(frozen=True, slots=True)
class Window:
    """The victim between two moments."""

    rounds_per_s: float
    rounds_per_cpu_s: float | None
    """By its own CPU time and its daemon's. None: it used none."""
    peak_mib: float
    """Of node and daemon together."""
    others_share: float | None
    """Of the victim's core, what neither it nor its daemon used: other processes, other machines on the same
    host. None: not known."""


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    mib: float
    cpu_s: float
    core_s: float | None
    """Seconds that the victim's core was busy or lent elsewhere."""


class Swarm:
    """A victim and an honest node that train on each other's groups.

    with Swarm(folder, model) as swarm:
        window = swarm.window(since, until)
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._samples: list[Sample] = []
        self._over = Event()
        self._nodes: list[JoinedNode] = []

    def __enter__(self) -> Self:
        try:
            self.victim = self.start("victim", "--seed", "1", prefix=VICTIMS_CORE)
            self.honest = self.start("honest", self.address, "--seed", "2", prefix=OTHERS_CORE)
            self.honest.running()
            self._sampler = Thread(target=self._sample, daemon=True)
            self._sampler.start()
            peer = self.honest.status()["peer_id"]
            self.victim.until(lambda: self.victim.status()["exchange"]["trained"].get(peer, 0) > 16)
        except BaseException:
            self._end_nodes()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._over.set()
        self._sampler.join()
        self._end_nodes()

    def start(
        self, home: str, *arguments: str, prefix: tuple[str, ...] = (), warm: WarmStart | None = None
    ) -> JoinedNode:
        """One more node, ended with the swarm."""
        options = ("--model", str(self._model), *OPTIONS, *STEADY)
        node = JoinedNode(self._folder / home, *options, *arguments, prefix=prefix, warm=warm)
        self._nodes.append(node)
        return node

    @property
    def address(self) -> str:
        return self.victim.running().addresses[0]

    @property
    def addresses(self) -> list[str]:
        return [self.address, self.honest.running().addresses[0]]

    @contextmanager
    def honest_held(self) -> Iterator[None]:
        """Stop the honest node, not its daemon: an attacker that starts has the core it shares to itself,
        and is ready in a second instead of five."""
        self.honest.kill(signal.SIGSTOP)
        try:
            yield
        finally:
            self.honest.kill(signal.SIGCONT)

    @contextmanager
    def flooded_port(self, attack: str) -> Iterator[str]:
        """The port that an attack floods; empty where it floods none. `swarmnode serve` runs on the others'
        core: what it passes on to the victim is what counts."""
        if attack != "serve_flood":
            yield str(self.victim.running().http_port) if attack == "page_flood" else ""
            return
        with ExitStack() as stack:
            with self.honest_held():
                port = stack.enter_context(serving(self.victim.home, OTHERS_CORE))
            yield str(port)

    def restarts(self) -> tuple[int, int]:
        """Of both daemons so far: those that the memory watchdog asked for, and all others."""
        networks = [node.status()["network"] for node in (self.victim, self.honest)]
        # A node without a watchdog does not count what it asked for.
        watchdog = sum(network.get("memory_restarts", 0) for network in networks)
        return watchdog, sum(network["restarts"] for network in networks)

    def window(self, since: float, until: float) -> Window:
        """What the victim did in this time."""
        done = _progress(_round_times(self.victim), until) - _progress(_round_times(self.victim), since)
        samples = [sample for sample in self._samples if since <= sample.at <= until]
        cpu_s = samples[-1].cpu_s - samples[0].cpu_s if len(samples) > 1 else 0.0
        share = (samples[-1].at - samples[0].at) / (until - since) if cpu_s else 0.0
        return Window(
            rounds_per_s=done / (until - since),
            rounds_per_cpu_s=done * share / cpu_s if cpu_s else None,
            peak_mib=max((sample.mib for sample in samples), default=0.0),
            others_share=_others_share(samples),
        )

    def _sample(self) -> None:
        node = psutil.Process(self.victim.process.pid)
        daemons_cpu_s: dict[int, float] = {}
        while not self._over.wait(SAMPLE_EVERY_S):
            mib = 0.0
            with suppress(psutil.NoSuchProcess):
                mib = node.memory_info().rss / MIB
                for child in node.children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        mib += child.memory_info().rss / MIB
                        daemons_cpu_s[child.pid] = _cpu_s(child)
                cpu_s = _cpu_s(node) + sum(daemons_cpu_s.values())
                self._samples.append(Sample(time.time(), mib, cpu_s, _core_s()))

    def _end_nodes(self) -> None:
        for node in self._nodes:
            node.end()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def busy_share(seconds: float) -> float:
    """How busy the cores are that this process may use, from 0 to 1, by a look of so many seconds."""
    shares = psutil.cpu_percent(seconds, percpu=True)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    return fmean(shares[number] for number in cores) / 100


def _core_s() -> float | None:
    """Seconds that the victim's core was busy so far, steal included. None: it has none of its own."""
    if not VICTIMS_CORE:
        return None
    times = psutil.cpu_times(percpu=True)[int(VICTIMS_CORE[-1])]
    # Guests are counted among the users already.
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def _others_share(samples: Sequence[Sample]) -> float | None:
    """
    >>> one, other = Sample(10.0, 0.0, 5.0, 100.0), Sample(12.0, 0.0, 6.0, 101.5)
    >>> _others_share([one, other])
    0.25
    """
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    if first.core_s is None or last.core_s is None:
        return None
    others_s = (last.core_s - first.core_s) - (last.cpu_s - first.cpu_s)
    return max(0.0, others_s / (last.at - first.at))


def rounds_of(node: JoinedNode) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that were written after rounds."""
    path = node.paths.logs / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [found for line in lines if (found := json.loads(line))["event"] == "round"]


def _round_times(node: JoinedNode) -> list[float]:
    return [line["time"] for line in rounds_of(node)]


def _progress(ends: Sequence[float], at: float) -> float:
    """Rounds done at a moment, the one under way by the share of its time that has passed.

    >>> _progress([10.0, 12.0, 16.0], 13.0)
    2.25
    """
    done = bisect_right(ends, at)
    if done == 0 or done == len(ends):
        return float(done)
    return done + (at - ends[done - 1]) / (ends[done] - ends[done - 1])
