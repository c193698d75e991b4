"""The processes of a pipeline under test: real `swarmnode join --pipeline`, each with a home of its own.

pipeline_churn.py -> [Swarm, Member] -> processes, status pages, signals -> records (pipeline_records.py)

A tiny Qwen3 in six layers, random at first, all of whose weights are trained on generated text: three stages
on loopback. Every member may hold any stage and has the text, so each can become a data node.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from pipeline_text import documents

from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import read_running

LAYERS, STAGES = 6, 3
POLL_S = 0.1
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 15.0


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

    @property
    def records(self) -> Path:
        """What it wrote down of each iteration as a data node."""
        return resolve_paths(self.home).logs / "metrics.jsonl"

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


class Swarm:
    """The members of one run. On leaving, all that are left are ended."""

    def __init__(self, folder: Path, model: Path, text: Path, size: int) -> None:
        """`size`: members that the first plan waits for."""
        self.folder = folder
        self.size = size
        self.members: list[Member] = []
        """All that there ever were; who came back under its own name, once."""
        self._model = model
        self._homes = 0
        self._settings: dict[str, object] = {
            "network.listen": "127.0.0.1",
            "exchange.enabled": "false",
            "policy.dtype": "float32",
            "pipeline.text": text,
            "pipeline.trainable": "full",
            "pipeline.stages": STAGES,
            "pipeline.skip": 0.25,
            "pipeline.slots": 3,
            "training.micro_batch_tokens": 512,
            "pipeline.wait_for_members": size,
            "limits.memory_gb": 0.5,
            "training.learning_rate": 3e-3,
        }

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
                member.process.wait(timeout=END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                member.signal(signal.SIGKILL)
                member.process.wait()

    def start(self, home: Path | None = None) -> Member:
        """A member, under a new name unless a home is given."""
        self._homes += home is None
        home = home or self.folder / f"member-{self._homes}"
        home.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "swarmnode", "join", *self.addresses(), "--home", str(home)]
        command += ["--model", str(self._model), "--pipeline", "churn", "--swarm", "churn"]
        for name, value in self._settings.items():
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

    def start_all(self, count: int) -> None:
        """The first alone, until the others can dial it. Raises TimeoutError."""
        self.start()
        until_s = time.monotonic() + START_TIMEOUT_S
        while not self.addresses():
            if time.monotonic() > until_s or not self.living():
                raise TimeoutError(f"the first member did not start: see {self.members[0].home}/output.log")
            time.sleep(POLL_S)
        for _ in range(count - 1):
            self.start()

    def living(self) -> list[Member]:
        return [member for member in self.members if member.alive and not member.frozen]

    def addresses(self) -> list[str]:
        notes = [read_running(resolve_paths(member.home).running) for member in self.living()]
        return [note.addresses[0] for note in notes if note is not None and note.addresses]


def build_model(folder: Path) -> Path:
    """Qwen3 in six layers with random weights, bytes for tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from swarmnode.extensions.demonstration.tiny import build_quick_tiny

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
