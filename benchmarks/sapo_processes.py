"""The same swarm as real processes over libp2p: whether what holds in lock-step holds in the wild.

Run -> `swarmnode join` * N on loopback -> metrics.jsonl, last lines -> [run_processes] -> Outcome

Nobody waits for anybody here: who is faster is heard more, and what comes too late counts for a later round.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sapo_models import models_of
from sapo_plan import Outcome, Rule, Run, Swarm

from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import read_running
from swarmnode.settings.config import Config

START_S, END_S = 120.0, 1200.0


def run_processes(run: Run, swarm: Swarm, rule: Rule, config: Config, settings: dict[str, Any]) -> Outcome:
    """The whole run. `config` is what `settings` come to on top of the preset."""
    models, before_s = models_of(swarm), _children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="sapo-homes-") as folder:
        homes = [Path(folder) / str(number) for number in range(swarm.nodes)]
        processes: list[subprocess.Popen[str]] = []
        try:
            for number, home in enumerate(homes):
                addresses = [_address_of(homes[0], processes[0])] if number and rule.shares else []
                command = _command(run, swarm, settings, number, home, models[number])
                processes.append(_start(command + addresses, home))
            lines = [process.communicate(timeout=END_S)[0].splitlines()[-1] for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        found = [_rounds(home) for home in homes]
    summaries = [json.loads(line) for line in lines]
    answers = config.rollout.groups * config.rollout.group_size
    return Outcome(
        rewards=[[one["reward.own"] for one in rounds] for rounds in found],
        answers=[[answers] * len(rounds) for rounds in found],
        joined=[0] * swarm.nodes,
        held_out=[summary["reward_last"] for summary in summaries],
        injected=[[] for _ in found],
        generated_tokens=sum(summary["tokens"] for summary in summaries),
        trained_tokens=sum(int(one["training.tokens"]) for rounds in found for one in rounds),
        received_tokens=None,
        sent_bytes=sum(int(rounds[-1]["exchange.bytes_out"]) for rounds in found),
        cpu_s=_children_cpu_s() - before_s,
        answers_a_round=answers,
    )


def _command(
    run: Run, swarm: Swarm, settings: dict[str, Any], number: int, home: Path, model: Path
) -> list[str]:
    here = {
        **settings,
        "network.listen": "127.0.0.1",
        "network.wait_for_peers": swarm.nodes - 1,
        "node.rounds": run.rounds,
        "node.seed": 1000 * run.seed + number,
        "node.eval_every": 0,
    }
    if "exchange.enabled" in settings:
        here.pop("network.wait_for_peers")
    return [
        *(sys.executable, "-P", "-m", "swarmnode", "join", "--preset", "tiny"),
        *("--home", str(home), "--model", str(model)),
        *[part for key, value in here.items() for part in ("--set", f"{key}={_toml(value)}")],
    ]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _start(command: list[str], home: Path) -> "subprocess.Popen[str]":
    home.mkdir(parents=True)
    with (home / "story.txt").open("w") as story:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=story, text=True
        )


def _address_of(home: Path, process: "subprocess.Popen[str]") -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if (note := read_running(resolve_paths(home).running)) is not None and note.addresses:
            return note.addresses[0]
        time.sleep(0.1)
    raise SystemExit(f"the first node did not start: {(home / 'story.txt').read_text()}")


def _rounds(home: Path) -> list[dict[str, Any]]:
    """The status after each round, as the node wrote it down."""
    lines = (resolve_paths(home).logs / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == "round"]


def _children_cpu_s() -> float:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
