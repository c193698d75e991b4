"""Runs in two processes, and what came of them on disk: a table can be made in parts.

Run -> [outcomes] -> a process of its own core -> Outcome -> cache

An outcome is found again by everything that it depends on: the run, its swarm, its rule, the preset, and the
code that learns and shares. So a change of that code runs it anew, and the same command goes on where it was.
With `any_code` what other code found will do: for a look at what has been gathered, not for a claim.
"""

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, fields
from pathlib import Path

from sapo_plan import Outcome, Run
from sapo_rules import RULES
from sapo_swarms import SWARMS

import swarmnode
from swarmnode.machine.storage import resolve_paths

FOLDER = resolve_paths().cache / "benchmarks" / "sapo"

LEARNS = (
    "exchange",
    "rollout",
    "tasks",
    "training",
    "settings",
    "node/rollout_learner.py",
    "testing/attackers.py",
)
"""The code that an outcome depends on, besides these files."""

OURS = ("models", "node", "processes", "run", "worlds")


def path_of(run: Run) -> Path:
    """Where its outcome is, or will be."""
    return FOLDER / f"{_name(run)}-{code()}.json"


def _name(run: Run) -> str:
    made_of = [asdict(run), asdict(SWARMS[run.swarm]), asdict(RULES[run.rule])]
    digest = hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=6).hexdigest()
    return f"{run.swarm}-{run.rule}-{run.learning_rate or 'preset'}-{run.seed}-{run.rounds}-{digest}"


def found(run: Run, *, any_code: bool = False) -> Outcome | None:
    """What came of it before, if it ever ran."""
    paths = [path for path in [path_of(run)] if path.is_file()]
    if any_code and not paths:
        paths = sorted(FOLDER.glob(f"{_name(run)}-*.json"), key=lambda path: path.stat().st_mtime)
    if not paths:
        return None
    known = json.loads(paths[-1].read_text())
    return Outcome(**{one.name: known[one.name] for one in fields(Outcome)})


def outcomes(
    runs: Iterable[Run],
    *,
    fresh: bool,
    any_code: bool,
    until_s: float,
    workers: int,
    show: Callable[[str], None],
) -> dict[Run, Outcome]:
    """Of all runs that were found or ended, so many at a time. None is begun after `until_s` on the monotonic
    clock."""
    wanted = list(dict.fromkeys(runs))
    before = {} if fresh else {run: found(run, any_code=any_code) for run in wanted}
    known = {run: outcome for run, outcome in before.items() if outcome is not None}
    missing = [run for run in wanted if run not in known]
    if missing:
        known |= _run_all(missing, until_s, workers, show)
    return known


def _run_all(
    runs: list[Run], until_s: float, workers: int, show: Callable[[str], None]
) -> dict[Run, Outcome]:
    ended: dict[Run, Outcome] = {}
    waiting, running = list(runs), dict[Future[None], Run]()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while waiting or running:
            while waiting and len(running) < workers and time.monotonic() < until_s:
                run = waiting.pop(0)
                running[pool.submit(_work, run)] = run
            if not running:
                show(f"{len(waiting)} of {len(runs)} runs are left out: there is no time for them")
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                future.result()
                outcome = found(run)
                assert outcome is not None
                ended[run] = outcome
                show(line_of(run, outcome))
    return ended


def line_of(run: Run, outcome: Outcome) -> str:
    """One line for people."""
    rate = "preset" if run.learning_rate is None else f"{run.learning_rate:g}"
    return (
        f"{run.swarm:12s} {run.rule:14s} lr {rate:7s} seed {run.seed}: cumulative {outcome.cumulative:6.2f},"
        f" held-out {outcome.last:.3f}, {outcome.cpu_s:.0f} CPU s"
    )


def _work(run: Run) -> None:
    """In a process of its own: it keeps what came of the run, and returns nothing."""
    from sapo_run import run_swarm

    outcome = run_swarm(run)
    path = path_of(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(asdict(outcome)))
    aside.replace(path)


_code: list[str] = []


def code() -> str:
    """A digest of the code that learns and shares."""
    if not _code:
        package = Path(swarmnode.__file__).parent
        roots = [package / part for part in LEARNS]
        files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))]
        files += [Path(__file__).parent / f"sapo_{name}.py" for name in OURS]
        digest = hashlib.blake2b(digest_size=8)
        for file in sorted(files):
            digest.update(file.read_bytes())
        digest.update((package.parent / "configs" / "tiny.toml").read_bytes())
        _code.append(digest.hexdigest())
    return _code[0]
