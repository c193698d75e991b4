"""How long a checkpoint holds up the training, written in the background against written on the spot.

`held_up_vs_sync`: time that the training thread is held by a checkpoint, as share of what writing the same
one there and then takes, on about 100 MB of adapter and Adam's moments; `held_up_vs_sync_tiny` on the shapes
of the tiny policy. On the spot it is held for the snapshot and the write, in the background for the snapshot
and for handing it over; that write ends before the next variant begins. `slowdown_beside_a_write` is what
training (matrix products in one thread) takes while a write is under way, against without one.

`kills_survived`: a process saves a small policy without a pause, and is ended by SIGKILL at random moments;
the share of kills after which the newest checkpoint is whole and not older than what was said to be on disk.

python benchmarks/checkpoint.py [--quick] [--json FILE]
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from common import arguments, interleaved, middle, ratios, report
from transformers import Qwen2Config, Qwen2ForCausalLM

from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.node.workers import CheckpointWriter
from swarmnode.settings.config import PolicyConfig
from swarmnode.training.checkpoints.checkpoint import Snapshot, Waiting, take_snapshot
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import Counters

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.swarm.killable_saver import KillableSaver, is_whole, store_in

WAITING = Waiting(rollouts=b"x" * 400_000)
"""About what 64 waiting groups take."""
TRAINING_STEPS = 12


class Saver:
    """One policy with its optimizer and its store; every save is of a new round."""

    def __init__(self, root: Path, name: str, hidden: int, rank: int) -> None:
        self.policy = _policy(name, hidden, rank)
        self.optimizer = torch.optim.AdamW(list(self.policy.trainable().values()), lr=1e-4)
        for parameter in self.policy.trainable().values():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.store = CheckpointStore(root / name, keep=2)
        self.writer = CheckpointWriter(self.store.write)
        self.round = 0
        self.operand = torch.rand(400, 400)

    def size_mb(self) -> float:
        snapshot = self._snapshot()
        return sum(t.nbytes for part in (snapshot.adapter, snapshot.optimizer) for t in part.values()) / 1e6

    def synchronous(self) -> float:
        """Seconds that the training thread is held."""
        started = time.perf_counter()
        self.store.write(self._snapshot())
        return time.perf_counter() - started

    def background(self) -> float:
        """The same; the write that goes on is waited for afterwards."""
        started = time.perf_counter()
        written = self.writer.submit(self._snapshot())
        held_s = time.perf_counter() - started
        written.result()
        return held_s

    def training(self) -> float:
        """Seconds of some work like training."""
        started = time.perf_counter()
        for _ in range(TRAINING_STEPS):
            self.operand @ self.operand
        return time.perf_counter() - started

    def training_beside_a_write(self) -> float:
        written = self.writer.submit(self._snapshot())
        seconds = self.training()
        written.result()
        return seconds

    def _snapshot(self) -> Snapshot:
        self.round += 1
        return take_snapshot(self.policy, self.optimizer, Counters(round=self.round), WAITING, seed=0)


def _policy(name: str, hidden: int, rank: int) -> Policy:
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    base = LoadedModel(name, Qwen2ForCausalLM(config).eval(), SimpleNamespace(eos_token_id=1), "fingerprint")
    return Policy(base, PolicyConfig(lora_rank=rank), seed=0)


def held_up(saver: Saver, repeats: int) -> Mapping[str, list[float]]:
    """Interleaved seconds by variant."""
    variants: dict[str, Callable[[], float]] = {
        "synchronous": saver.synchronous,
        "background": saver.background,
        "training": saver.training,
        "beside": saver.training_beside_a_write,
    }
    return interleaved(variants, repeats, share=0.5)  # the kills need the rest of the time


def kills_survived(root: Path, kills: int) -> float:
    rng, last, survived = random.Random(0), 0, 0
    with KillableSaver() as saver:
        for _ in range(kills):
            acknowledged = saver.killed_after(rng.randrange(3), rng.uniform(0.0, 0.06), root, last)
            newest = store_in(root).tidy()
            if newest is None:
                survived += acknowledged == 0
                continue
            last = newest.state.counters.round
            survived += is_whole(newest) and last >= acknowledged
    return survived / kills


def main() -> None:
    options = arguments(__doc__ or "")
    repeats, kills = (5, 20) if options.quick else (15, 100)
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    extra: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        for name, hidden, rank in (("large", 1024, 256), ("tiny", 64, 16)):
            saver = Saver(root, name, hidden, rank)
            saver.synchronous(), saver.background()
            times = held_up(saver, repeats)
            share, around = middle(ratios(times["background"], times["synchronous"]))
            label = "held_up_vs_sync" if name == "large" else "held_up_vs_sync_tiny"
            claims[label], spread[label] = share, around
            sync_s, back_s = (middle(times[key])[0] for key in ("synchronous", "background"))
            slow, _ = middle(ratios(times["beside"], times["training"]))
            size = saver.size_mb()
            print(
                f"{name}: {size:.1f} MB, held up {1000 * sync_s:.1f} ms on the spot,"
                f" {1000 * back_s:.1f} ms in the background; training beside a write takes {slow:.2f} times"
            )
            extra |= {
                f"{name}_mb": round(size, 2),
                f"{name}_sync_ms": round(1000 * sync_s, 2),
                f"{name}_background_ms": round(1000 * back_s, 2),
                f"{name}_slowdown_beside_a_write": round(slow, 3),
            }
            saver.writer.close()
        claims["kills_survived"] = kills_survived(root / "killed", kills)
        spread["kills_survived"] = (claims["kills_survived"],) * 2
        print(f"{kills} kills, survived: {claims['kills_survived']:.0%}")
    report("checkpoint", claims, spread, options.json, {"kills": kills, "repeats": repeats, **extra})


if __name__ == "__main__":
    main()
