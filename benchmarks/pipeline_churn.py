"""A pipeline whose members are killed and frozen while it learns: what a death costs in time and in learning.

python benchmarks/pipeline_churn.py [--quick] [--json FILE]

Real `swarmnode join --pipeline` processes on loopback hold three stages of a tiny Qwen3 in six layers, all of
whose weights are trained on generated text. Every few iterations one of them, drawn by a seed, gets a SIGKILL
(its network daemon with it) at a moment within an iteration, or is frozen for a while; a killed one comes
back a few seconds later, under its own name or as a newcomer. Each kind is hit: data nodes, members of other
stages, and the convener.

Beside it the same without deaths, several times: every run has other peer ids and so other text, which is the
spread that a curve has by chance. Claims:
  deaths, freezes      SIGKILLs, SIGSTOPs
  restarts             survivors that ended, and iterations that were run twice: must be 0
  loss_vs_seed_spread  |final loss - mean of the undisturbed| / their standard deviation
  lost_s_per_death     wall time beyond the undisturbed median iteration, for each death or freeze
  longest_stall_s      the longest iteration, from one step to the next
  repaired, given_up   micro-batches that took another path; that never came back
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil
from common import arguments, report
from pipeline_text import documents

from swarmnode.node.running import read_running
from swarmnode.paths import resolve_paths

LAYERS, STAGES = 6, 3
POLL_S = 0.1
START_TIMEOUT_S = 180.0
STALL_TIMEOUT_S = 300.0
"""Without a step for so long, the run has failed."""

Kind = Literal["data", "stage", "convener"]
KINDS: tuple[Kind, ...] = ("data", "stage", "convener")


@dataclass(frozen=True, slots=True)
class Shape:
    """How long and how rough a run is."""

    iterations: int
    deaths_every: tuple[int, int]
    """Iterations between one death and the next: from, to."""
    deaths: int
    """At most."""
    frozen_share: float
    """Of the deaths, those that are freezes instead."""
    away_s: tuple[float, float] = (2.0, 6.0)
    """Until a killed member is started again."""
    frozen_s: tuple[float, float] = (5.0, 25.0)
    members: int = 6
    smoothed: int = 8
    """The final loss is the mean over so many iterations."""
    undisturbed: int = 2
    """Runs without deaths."""


FULL = Shape(iterations=50, deaths_every=(3, 5), deaths=50, frozen_share=0.25)
QUICK = Shape(
    iterations=10, deaths_every=(3, 3), deaths=2, frozen_share=0.0, members=5, smoothed=3, undisturbed=1
)


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration, as one data node wrote it down."""

    iteration: int
    """Steps taken, this one included."""
    at_s: float
    """Seconds since the epoch."""
    loss: float
    tokens: float
    peer: str


@dataclass(slots=True, eq=False)
class Member:
    """One process, and the home that it lives in."""

    home: Path
    process: subprocess.Popen[bytes]
    frozen: bool = False
    offset: int = 0
    """Bytes of its records that were read."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def status(self) -> dict[str, Any] | None:
        """What it says of itself; None: nothing."""
        note = read_running(resolve_paths(self.home).running)
        if note is None or note.pid != self.process.pid or self.frozen:
            return None
        try:
            with urllib.request.urlopen(
                f"http://{note.http_host}:{note.http_port}/status", timeout=3
            ) as page:
                return json.load(page)
        except OSError:
            return None

    def signal(self, number: signal.Signals) -> None:
        """To the process and its network daemon: as if the machine lost power, or slept."""
        own = psutil.Process(self.process.pid)
        for process in (*own.children(recursive=True), own):
            process.send_signal(number)


@dataclass(slots=True)
class Run:
    """What came of one."""

    steps: list[Step] = field(default_factory=list[Step])
    deaths: list[str] = field(default_factory=list[str])
    """Of every death: who and how."""
    died_in: list[int] = field(default_factory=list[int])
    """The iteration that each death fell into."""
    freezes: int = 0
    ended: list[str] = field(default_factory=list[str])
    """Survivors that ended."""
    counts: Counter[str] = field(default_factory=Counter[str])
    started_at_s: float = 0.0

    @property
    def iterations(self) -> int:
        return max((step.iteration for step in self.steps), default=0)

    def losses(self) -> list[float]:
        """By iteration, over the data nodes."""
        return [
            sum(step.loss * step.tokens for step in steps) / sum(step.tokens for step in steps)
            for _, steps in sorted(self._by_iteration().items())
        ]

    def durations(self) -> list[float]:
        """From one step to the next, by iteration; the first iteration has none."""
        ends = [min(step.at_s for step in steps) for _, steps in sorted(self._by_iteration().items())]
        return [after - before for before, after in pairwise(ends)]

    def repeated(self) -> int:
        """Iterations that were run again, or left out."""
        twice = Counter((step.iteration, step.peer) for step in self.steps)
        return sum(count - 1 for count in twice.values()) + self.iterations - len(self._by_iteration())

    def _by_iteration(self) -> dict[int, list[Step]]:
        found: dict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            found[step.iteration].append(step)
        return found


class Swarm:
    """The processes of one run. On leaving, all that are left are ended."""

    def __init__(self, folder: Path, model: Path, text: Path, shape: Shape) -> None:
        self.folder = folder
        self._model = model
        self._text = text
        self._shape = shape
        self.members: list[Member] = []
        self._homes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for member in self.members:
            if member.alive:
                member.signal(signal.SIGCONT)
                member.process.terminate()
        for member in self.members:
            try:
                member.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                member.signal(signal.SIGKILL)
                member.process.wait()

    def start(self, home: Path | None = None) -> Member:
        """A member, under a new name unless a home is given."""
        self._homes += home is None
        home = home or self.folder / f"member-{self._homes}"
        home.mkdir(exist_ok=True)
        settings = {
            "network.listen": "127.0.0.1",
            "exchange.enabled": "false",
            "policy.dtype": "float32",
            "pipeline.text": self._text,
            "pipeline.trainable": "full",
            "pipeline.stages": STAGES,
            "pipeline.skip": 0.25,
            "pipeline.slots": 3,
            "pipeline.waves": 4,
            "pipeline.micro_batch_tokens": 512,
            "pipeline.wait_for_members": self._shape.members,
            "pipeline.memory_gb": 0.5,
            "pipeline.search_tasks": 20_000,
            "training.learning_rate": 3e-3,
        }
        command = [sys.executable, "-m", "swarmnode", "join", *self.addresses(), "--home", str(home)]
        command += ["--model", str(self._model), "--pipeline", "churn", "--swarm", "churn"]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        with (home / "output.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        member = Member(home, process)
        former = next((other for other in self.members if other.home == home), None)
        if former is not None:
            member.offset = former.offset
            self.members.remove(former)
        self.members.append(member)
        return member

    def living(self) -> list[Member]:
        return [member for member in self.members if member.alive and not member.frozen]

    def read(self) -> list[Step]:
        """What was written down since the last time."""
        return [step for member in self.members for step in _read(member)]

    def addresses(self) -> list[str]:
        notes = [read_running(resolve_paths(member.home).running) for member in self.living()]
        return [note.addresses[0] for note in notes if note is not None and note.addresses]


def _read(member: Member) -> Iterable[Step]:
    file = resolve_paths(member.home).logs / "metrics.jsonl"
    if not file.exists():
        return
    with file.open("rb") as records:
        records.seek(member.offset)
        for line in records:
            if not line.endswith(b"\n"):
                break
            member.offset += len(line)
            record = json.loads(line)
            if record["event"] == "round" and "training.loss" in record:
                yield Step(
                    round(record["progress.policy_version"]),
                    record["time"],
                    record["training.loss"],
                    record["training.tokens"],
                    record["peer"],
                )


class Reaper:
    """Decides who dies when, and does it."""

    def __init__(self, swarm: Swarm, run: Run, shape: Shape, seed: int) -> None:
        self._swarm = swarm
        self._run = run
        self._shape = shape
        self._chance = random.Random(seed)
        self._next = shape.deaths_every[0]
        self._at_s = float("inf")
        self._events: list[tuple[float, Literal["start", "thaw"], Member]] = []

    def turn(self, iteration: int) -> None:
        """Called all the time, with the number of steps taken."""
        now_s = time.monotonic()
        for event in [event for event in self._events if event[0] <= now_s]:
            self._events.remove(event)
            self._bring_back(event[1], event[2])
        over = len(self._run.died_in) >= self._shape.deaths or iteration >= self._shape.iterations - 2
        if over or iteration < self._next:
            return
        if self._at_s == float("inf"):
            # Somewhere within an iteration, not at its boundary only.
            durations = self._run.durations()[-10:]
            self._at_s = now_s + self._chance.uniform(0, statistics.median(durations) if durations else 1.0)
        if now_s < self._at_s or not self._strike(iteration):
            return
        self._at_s = float("inf")
        self._next = iteration + self._chance.randint(*self._shape.deaths_every)

    def _strike(self, iteration: int) -> bool:
        """One member dies, if all but two are in their places: some have to be back to be lost again."""
        statuses = {member: member.status() for member in self._swarm.living()}
        seated = {member: s for member, s in statuses.items() if s and s["pipeline"]["stage"] is not None}
        if len(seated) < self._shape.members - 2:
            return False
        kinds = self._chance.sample(KINDS, len(KINDS))
        for kind in kinds:
            able = self._able(kind, seated)
            if able:
                self._end(self._chance.choice(able), kind, iteration, seated)
                return True
        return False

    def _able(self, kind: Kind, seated: dict[Member, dict[str, Any]]) -> list[Member]:
        data = [member for member, status in seated.items() if status["pipeline"]["stage"] == 0]
        if kind == "data":
            return data if len(data) > 1 else []
        if kind == "stage":
            return [member for member in seated if member not in data]
        convener = min(seated, key=lambda member: seated[member]["peer_id"])
        return [] if data == [convener] else [convener]

    def _end(self, member: Member, kind: Kind, iteration: int, seated: dict[Member, dict[str, Any]]) -> None:
        chance, now_s, stage = self._chance, time.monotonic(), seated[member]["pipeline"]["stage"]
        replicas = sum(status["pipeline"]["stage"] == stage for status in seated.values())
        freezes = chance.random() < self._shape.frozen_share
        if freezes:
            member.signal(signal.SIGSTOP)
            member.frozen = True
            self._run.freezes += 1
            back_s = chance.uniform(*self._shape.frozen_s)
            self._events.append((now_s + back_s, "thaw", member))
        else:
            self._run.counts.update(_counts(seated[member]))
            member.signal(signal.SIGKILL)
            member.process.wait()
            back_s = chance.uniform(*self._shape.away_s)
            self._events.append((now_s + back_s, "start", member))
        self._run.died_in.append(iteration + 1)
        how = "frozen" if freezes else "killed"
        what = f"{how}: {member.home.name} ({kind}), one of {replicas} of stage {stage}"
        print(f"  iteration {iteration + 1}: {what}, back in {back_s:.0f} s", flush=True)
        self._run.deaths.append(what)

    def _bring_back(self, how: Literal["start", "thaw"], member: Member) -> None:
        if how == "thaw":
            member.signal(signal.SIGCONT)
            member.frozen = False
        else:
            self._swarm.start(member.home if self._chance.random() < 0.5 else None)


def _counts(status: dict[str, Any]) -> Counter[str]:
    names = ("repaired", "given_up", "stragglers", "plans")
    return Counter({name: status["pipeline"].get(name) or 0 for name in names})


def run(folder: Path, model: Path, text: Path, shape: Shape, *, seed: int, deadly: bool) -> Run:
    """One run to its last iteration. Raises TimeoutError when no step is taken for long."""
    result = Run()
    folder.mkdir(parents=True)
    with Swarm(folder, model, text, shape) as swarm:
        swarm.start()
        _until_there(swarm, START_TIMEOUT_S)
        for _ in range(shape.members - 1):
            swarm.start()
        reaper = Reaper(swarm, result, shape, seed)
        moved_at_s = time.monotonic()
        while result.iterations < shape.iterations:
            before = result.iterations
            result.steps += swarm.read()
            if deadly:
                reaper.turn(result.iterations)
            now_s = time.monotonic()
            if result.iterations > before:
                moved_at_s = now_s
                _say(result, before)
            elif now_s > moved_at_s + STALL_TIMEOUT_S:
                raise TimeoutError(f"no step for {STALL_TIMEOUT_S:.0f} s after {before} iterations")
            _note_ended(swarm, result)
            if len(result.ended) >= shape.members:
                raise RuntimeError("the pipeline has ended: " + "; ".join(result.ended))
            time.sleep(POLL_S)
        for member in swarm.living():
            if (status := member.status()) is not None:
                result.counts.update(_counts(status))
    return result


def _until_there(swarm: Swarm, timeout_s: float) -> None:
    """Wait until the first member can be dialled."""
    until_s = time.monotonic() + timeout_s
    while not swarm.addresses():
        if time.monotonic() > until_s or not swarm.living():
            raise TimeoutError("the first member did not start")
        time.sleep(POLL_S)


def _note_ended(swarm: Swarm, result: Run) -> None:
    for member in swarm.members:
        code = member.process.poll()
        what = f"{member.home.name} ended with {code}"
        if code is not None and code != -signal.SIGKILL and what not in result.ended:
            print(f"  {what}: see {member.home / 'output.log'}", flush=True)
            result.ended.append(what)


def _say(result: Run, before: int) -> None:
    losses, durations = result.losses(), result.durations()
    if len(durations) and (result.iterations % 5 == 0 or durations[-1] > 5 * statistics.median(durations)):
        print(f"  iteration {result.iterations}: loss {losses[-1]:.3f}, {durations[-1]:.1f} s", flush=True)


def build_model(folder: Path) -> Path:
    """Qwen3 in six layers with random weights, bytes for tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from swarmnode.training.tiny import build_quick_tiny

    tiny = build_quick_tiny(folder / "models")
    config = AutoConfig.from_pretrained(str(tiny))
    config.num_hidden_layers = LAYERS
    config.layer_types = ["full_attention"] * LAYERS
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    target = folder / "model"
    model.save_pretrained(str(target))
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, target / file.name)
    return target


def build_text(folder: Path) -> Path:
    folder.mkdir()
    (folder / "text.txt").write_text("\n\n".join(documents(2000)), encoding="ascii")
    return folder


def main() -> None:
    # The members end with us, also when it is a time limit that ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = arguments("what the deaths of members cost a pipeline, in time and in what it learns")
    shape = QUICK if options.quick else FULL
    kept = os.environ.get("CHURN_FOLDER")
    with ExitStack() as stack:
        folder = Path(kept) if kept else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, text = build_model(folder), build_text(folder / "text")
        print("with deaths", flush=True)
        churned = run(folder / "churn", model, text, shape, seed=1, deadly=True)
        calm: list[Run] = []
        for number in range(shape.undisturbed):
            print(f"without, {number + 1} of {shape.undisturbed}", flush=True)
            calm.append(run(folder / f"calm-{number}", model, text, shape, seed=1, deadly=False))
    tell(churned, calm, shape, options.json)


def tell(churned: Run, calm: list[Run], shape: Shape, json_path: Path | None) -> None:
    finals = [statistics.mean(each.losses()[-shape.smoothed :]) for each in calm]
    final = statistics.mean(churned.losses()[-shape.smoothed :])
    spread = statistics.stdev(finals) if len(finals) > 1 else float("nan")
    medians = [statistics.median(each.durations()) for each in calm]
    median_s = statistics.median(medians)
    durations, hit = churned.durations(), len(churned.died_in)
    lost_s = [
        (sum(durations) - each * len(durations)) / hit for each in (median_s, max(medians), min(medians))
    ]
    report(
        "pipeline_churn",
        claims={
            "deaths": hit - churned.freezes,
            "freezes": churned.freezes,
            "restarts": len(churned.ended) + churned.repeated(),
            "loss_vs_seed_spread": abs(final - statistics.mean(finals)) / spread,
            "lost_s_per_death": lost_s[0],
            "longest_stall_s": max(durations),
            "iterations": churned.iterations,
            "repaired": churned.counts["repaired"],
            "given_up": churned.counts["given_up"],
            "stragglers": churned.counts["stragglers"],
        },
        spread={"lost_s_per_death": (lost_s[1], lost_s[2])},
        json_path=json_path,
        extra={
            "final_loss": round(final, 4),
            "undisturbed_final_losses": [round(each, 4) for each in finals],
            "undisturbed_iteration_s": round(median_s, 3),
            "iteration_s": [round(each, 2) for each in durations],
            "losses": [round(each, 4) for each in churned.losses()],
            "killed": churned.deaths,
            "died_in": churned.died_in,
            "ended": churned.ended,
        },
    )


if __name__ == "__main__":
    main()
