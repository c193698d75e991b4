"""A process that saves checkpoints without a pause and can be killed, again and again.

test_checkpoint_kill.py, benchmarks/checkpoint.py -> KillableSaver -> [main] -> one fork per kill -> the store

Importing torch takes seconds, so one process does it once, starts no thread, and forks a child per kill.
What a child saves tells whether it is whole: every number in adapter and optimizer is the round.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.node.workers import CheckpointWriter
from swarmnode.settings.config import PolicyConfig
from swarmnode.training.checkpoints.checkpoint import Checkpoint, Waiting, take_snapshot
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import Counters

DISK_STEPS = ("mkdir", "fsync", "rename", "unlink", "rmdir")
"""What changes the disk or waits for it. Not reading: how much is read depends on what earlier kills left."""
KEPT = 2


def store_in(root: Path) -> CheckpointStore:
    return CheckpointStore(root / "random", keep=KEPT)


def reward_of(number: int) -> float:
    """Not in order, so that now and then the best is not among the newest."""
    return (number * 37 % 101) / 101


def is_whole(checkpoint: Checkpoint) -> bool:
    """Do adapter, optimizer, waiting groups and counters come from one round?"""
    from safetensors.torch import load_file

    number = checkpoint.state.counters.round
    adapter = load_file(checkpoint.adapter / "adapter_model.safetensors")
    optimizer = load_file(checkpoint.folder / "optimizer.safetensors")
    tensors = [*adapter.values(), *(tensor for name, tensor in optimizer.items() if "/" in name)]
    waiting = [(checkpoint.folder / name).read_bytes() for name in ("rollouts.bin", "rule.bin")]
    same = all(bool((tensor == number).all()) for tensor in tensors)
    moments = sum(name.startswith("exp_avg/") for name in optimizer)
    return same and moments == len(adapter) > 0 and waiting == [b"%d" % number] * 2


class KillableSaver:
    """Runs the process below: `with KillableSaver() as saver: saver.killed_after(2, 0.02, root, 7)`."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._expect("ready")

    def __enter__(self) -> "KillableSaver":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def killed_after(self, saves: int, delay_s: float, root: Path, last_round: int) -> int:
        """Save rounds after `last_round` until SIGKILL, which comes `delay_s` after so many saves are done.

        Returns the last round that was said to be on disk.
        """
        child = self._start(root, last_round, -1)
        for _ in range(saves):
            last_round = int(self._expect("saved"))
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        return self._last_acknowledged(last_round)

    def killed_at(self, step: int, root: Path, last_round: int) -> int:
        """The same, with SIGKILL right before the disk step `step`, counted from 0."""
        self._start(root, last_round, step)
        return self._last_acknowledged(last_round)

    def _start(self, root: Path, last_round: int, step: int) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{last_round} {step} {root}\n")
        self._process.stdin.flush()
        return int(self._expect("child"))

    def _last_acknowledged(self, last_round: int) -> int:
        while (line := self._line()) != "ended":
            last_round = int(line.removeprefix("saved "))
        return last_round

    def _expect(self, word: str) -> str:
        line = self._line()
        assert line.startswith(word), line
        return line.removeprefix(word).strip()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the saving process ended"
        return line.strip()


def main() -> None:
    policy, optimizer = _policy_with_optimizer()
    _say("ready")
    for line in sys.stdin:
        last_round, step, root = line.rstrip("\n").split(" ", 2)
        child = os.fork()
        if child == 0:
            if int(step) >= 0:
                _die_at(int(step))
            _save_for_ever(store_in(Path(root)), policy, optimizer, int(last_round))
        _say(f"child {child}")
        os.waitpid(child, 0)
        _say("ended")


def _policy_with_optimizer() -> tuple[Policy, torch.optim.Optimizer]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    base = LoadedModel(
        "random", Qwen2ForCausalLM(config).eval(), SimpleNamespace(eos_token_id=1), "fingerprint"
    )
    policy = Policy(base, PolicyConfig(lora_rank=4), seed=0)
    optimizer = torch.optim.AdamW(list(policy.trainable().values()), lr=1e-3, foreach=False)
    for parameter in policy.trainable().values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return policy, optimizer


@torch.no_grad()
def _save_for_ever(
    store: CheckpointStore, policy: Policy, optimizer: torch.optim.Optimizer, number: int
) -> None:
    writer = CheckpointWriter(store.write)
    while True:
        number += 1
        for parameter in policy.trainable().values():
            parameter.fill_(number)
            for moment in optimizer.state[parameter].values():
                moment.fill_(number)
        counters = Counters(round=number, reward_last=reward_of(number), evaluated_round=number)
        waiting = Waiting(b"%d" % number, b"%d" % number)
        written = writer.submit(take_snapshot(policy, optimizer, counters, waiting, seed=0))
        written.add_done_callback(_acknowledge(number))
        time.sleep(0.003)


def _acknowledge(number: int) -> Callable[[Any], None]:
    def say(written: Any) -> None:
        if not written.cancelled():
            written.result()
            _say(f"saved {number}")

    return say


def _die_at(step: int) -> None:
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)

        return count

    for name in DISK_STEPS:
        setattr(os, name, counted(getattr(os, name)))


def _say(text: str) -> None:
    # One write: parent and child share the pipe.
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    main()
