"""What handing on costs: a seed between homes, and a node that serves them beside its own rounds.

python benchmarks/holders.py [--quick] [--json FILE]

Members without a policy (tests/homes/member.py), each in a home of its own that nobody can dial
(swarmnode/extensions/trial_swarm/nat_lab.py), whose groups have bodies of some 25 KiB as those of real models
have. Needs root, `ip` and `nft`.

- `seed_mb_per_1000_groups_N`: megabytes on the wire of a `swarmnode seed`, both directions and everything
  included, for each 1000 groups that N homes took in of each other.
- `seed_memory_mb_N`: of the seed and its daemon, resident, at the end.
- `holder_pace_share`: what a `swarmnode join` process keeps of its pace while it serves 8 homes as much as
  its upload cap allows: one less the part of a core that its event loop takes for that, which its trainer
  cannot have. Windows in which the homes rest take turns with it; what each round's bookkeeping takes of the
  loop is no part of it, and CPU seconds that are dearer because the homes share the machine (by the node's
  other threads, which serve nobody) count as cheap ones. Its daemon is told apart.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from common import arguments, report

from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.extensions.trial_swarm.nat_lab import Lab, LabMachine, stop, why_not
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import read_running

ROOT = Path(__file__).parent.parent
MEMBER = ROOT / "tests/homes/member.py"
PATIENCE_S = 120.0
CHARS = 3000
"""Of an answer, sixteen to a group; half of that in the body."""
GROUPS_PER_S = 2.0
"""Announced by all homes together: what 32 of them then ask for is about what a seed may upload."""
HOMES_AT_THE_HOLDER = 8
MB = 1e6


class Stage:
    """Processes in a lab; all of them end with it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holders-")))
        self.lab = stack.enter_context(Lab())
        self.rest = self.folder / "rest"
        self._said: list[Path] = []

    def start(self, machine: LabMachine, command: Sequence[str], name: str, **more: str) -> tuple[int, Path]:
        """Start a process; returns its pid and the file that it writes to."""
        said = self.folder / f"{name}.out"
        out = self._stack.enter_context(said.open("w"))
        errors = self._stack.enter_context((self.folder / f"{name}.log").open("w"))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
        process = machine.start([sys.executable, *command], env=environment, stdout=out, stderr=errors)
        self._stack.callback(stop, process)
        return process.pid, said

    def members(self, count: int, address: str, every_s: float) -> None:
        """Start so many members, each in its home, and wait until all are connected."""
        for number in range(count):
            (machine,) = self.lab.home()
            home = self.folder / f"home-{number}"
            home.mkdir()
            _, said = self.start(
                machine,
                [str(MEMBER), str(home), "4001", address],
                f"member-{number}",
                MEMBER_EVERY_S=str(every_s),
                MEMBER_CHARS=str(CHARS),
                MEMBER_REST=str(self.rest),
            )
            self._said.append(said)
        until(lambda: all(last(said).get("peers") for said in self._said))

    @property
    def taken(self) -> int:
        """Groups that the members took in."""
        return sum(sum(last(said).get("authors", {}).values()) for said in self._said)


def last(said: Path) -> dict[str, Any]:
    """The last whole line of a member."""
    lines = said.read_text().splitlines()
    return next((json.loads(line) for line in reversed(lines) if line.endswith("}")), {})


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError("the members took too long")
        time.sleep(0.2)


def on_the_wire(machine: LabMachine) -> int:
    """Bytes that a machine received and sent."""
    (link,) = json.loads(machine.run(["ip", "-s", "-j", "link", "show", machine.link]))
    return link["stats64"]["rx"]["bytes"] + link["stats64"]["tx"]["bytes"]


def family(pid: int) -> list[psutil.Process]:
    """A process and its daemon."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def seed_pays(homes: int, seconds: float) -> tuple[float, float]:
    """Megabytes for each 1000 groups that homes took in, and of memory."""
    with ExitStack() as stack:
        stage = Stage(stack)
        machine = stage.lab.public()
        command = ["-P", "-m", "swarmnode", "seed", "--home", str(stage.folder / "seed")]
        pid, said = stage.start(machine, command, "seed")
        until(lambda: said.read_text().endswith("\n"))
        stage.members(homes, said.read_text().strip(), homes / GROUPS_PER_S)
        until(lambda: stage.taken >= homes)
        wire, taken = on_the_wire(machine), stage.taken
        time.sleep(seconds)
        groups = stage.taken - taken
        megabytes = (on_the_wire(machine) - wire) / MB
        memory = sum(one.memory_info().rss for one in family(pid)) / MB
        print(
            f"{homes:3} homes: {groups} groups in {seconds:.0f} s, {megabytes:.1f} MB on the seed's wire,"
            f" {1000 * megabytes / groups:.1f} MB for each 1000, {memory:.0f} MB of memory",
            flush=True,
        )
        return 1000 * megabytes / groups, memory


def holder_pace(seconds: float, windows: int) -> tuple[list[float], dict[str, float]]:
    """Shares of pace, one for each pair of windows; and what the holder did meanwhile."""
    with ExitStack() as stack:
        stage = Stage(stack)
        machine = stage.lab.public()
        home = stage.folder / "holder"
        command = ["-P", "-m", "swarmnode", "join", "--home", str(home), "--preset", "tiny"]
        command += ["--model", str(build_tiny(stage.folder / "models")), "--set", "tasks.eval_examples=8"]
        pid, _ = stage.start(machine, command, "holder")
        paths = resolve_paths(home)
        until(lambda: read_running(paths.running) is not None)
        note = read_running(paths.running)
        assert note is not None
        address = next(one for one in note.addresses if machine.address in one)
        stage.members(HOMES_AT_THE_HOLDER, address, 1.0)
        until(lambda: stage.taken >= HOMES_AT_THE_HOLDER)

        shares: list[float] = []
        daemon_cores: list[float] = []
        sent_mb_per_s: list[float] = []
        for number in range(windows):
            found: dict[bool, Use] = {}
            for resting in (True, False) if number % 2 else (False, True):
                stage.rest.touch() if resting else stage.rest.unlink(missing_ok=True)
                time.sleep(3.0)  # what was announced before is asked for
                before = use_of(pid, paths.logs / "metrics.jsonl")
                time.sleep(seconds)
                found[resting] = use_of(pid, paths.logs / "metrics.jsonl").since(before)
            shares.append(1.0 - extra_cores(found[False], found[True], seconds))
            daemon_cores.append((found[False].daemon_s - found[True].daemon_s) / seconds)
            sent_mb_per_s.append(found[False].sent / MB / seconds)
            print(f"  serving {found[False]}\n  resting {found[True]}: share {shares[-1]:.3f}", flush=True)
        return shares, {"served_mb_per_s": median(sent_mb_per_s), "daemon_cores": median(daemon_cores)}


@dataclass(frozen=True)
class Use:
    """What a node did and took, in total or in a window."""

    rounds: float
    sent: float
    """Bytes."""
    loop_s: float
    """CPU seconds of its event loop, which is its main thread."""
    others_s: float
    """Of its other threads."""
    daemon_s: float

    def since(self, before: "Use") -> "Use":
        return Use(*(b - a for a, b in zip(astuple(before), astuple(self), strict=True)))


def use_of(pid: int, metrics: Path) -> Use:
    node, *daemons = family(pid)
    (loop,) = (one for one in node.threads() if one.id == pid)
    loop_s = loop.user_time + loop.system_time
    all_s, *daemon_s = (sum(one.cpu_times()[:2]) for one in (node, *daemons))
    return Use(*rounds(metrics), loop_s, all_s - loop_s, sum(daemon_s))


def extra_cores(serving: Use, resting: Use, seconds: float) -> float:
    """The part of a core that serving took of the event loop."""
    dearer = (serving.others_s / serving.rounds) / (resting.others_s / resting.rounds)
    bookkeeping_s = resting.loop_s / resting.rounds * serving.rounds
    return (serving.loop_s / dearer - bookkeeping_s) / seconds


def rounds(metrics: Path) -> tuple[float, float]:
    """Rounds so far, and bytes sent as of the last of them."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for line in reversed(lines):
        if line.endswith("}") and (found := json.loads(line)).get("event") == "round":
            return found["progress.round"], found.get("exchange.bytes_out", 0.0)
    return 0.0, 0.0


def main() -> None:
    options = arguments(__doc__ or "")
    if reason := why_not():
        raise SystemExit(f"no homes can be built here: {reason}")
    seconds = 10.0 if options.quick else 25.0
    claims: dict[str, float] = {}
    for homes in (2,) if options.quick else (2, 8, 32):
        found = seed_pays(homes, seconds)
        claims[f"seed_mb_per_1000_groups_{homes}"], claims[f"seed_memory_mb_{homes}"] = found
    shares, extra = holder_pace(seconds, 2 if options.quick else 3)
    print(f"a holder keeps {median(shares):.3f} of its pace; {extra}")
    claims["holder_pace_share"] = median(shares)
    spread = {name: (value, value) for name, value in claims.items()}
    spread["holder_pace_share"] = (min(shares), max(shares))
    report("holders", claims, spread, options.json, extra)


if __name__ == "__main__":
    main()
