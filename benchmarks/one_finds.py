"""What one finds, all know: a task that a node alone never gets right, and what one node that can changes.

    python benchmarks/one_finds.py [--quick] [--json FILE] [--picture FILE.svg]

Real processes over libp2p on loopback, the tiny policy, the task of last.py: three seeds, never right alone
in 120 rounds, each alone and then each joined to one node that knows. That one was shown two demonstrations,
which nobody hears of; what it publishes it has sampled. `alone_last`: the best held-out reward at the end of
those alone; `joined_last`: the worst of those joined; `rounds_to_half`: the latest round by which a joined
one samples half of its answers right. The baseline is the same seed alone, in the same run.

`first_success_speedup_8`: tokens that a node samples until every node has a right answer that its own judge
verified, where one answer in 400 is right: one node over eight, mean over repeats. In one process: the real
exchange, with its requests for help, on hosts in memory; a coin of that chance stands for the policy.

--quick: one seed, fewer repeats. --picture: sampled reward by round, of the first seed, alone and joined.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from common import BUDGET_S, MODELS, machine, report
from last import DEMONSTRATIONS
from learning import run

import swarmnode as sn
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import resolve_paths
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.node.building.node_process import read_running
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, one_span

TASK = Path(__file__).parent / "last.py"
SEEDS, ROUNDS, HALF = (1, 2, 3), 120, 0.5
START_S = 120.0
NODES, CHANCE, GROUP = 8, 1 / 400, 8
PATIENCE_S = 0.005
"""What a round waits for a first announcement: in lock-step all that is to come has been announced."""
HERE = ("--set", "network.mdns=false", "--task", str(TASK))


def main() -> None:
    options = arguments()
    if options.knower is not None:
        know(options.knower, Path(options.model))
        return
    began = time.monotonic()
    seeds, repeats = (SEEDS[:1], 8) if options.quick else (SEEDS, 40)
    alone, joined, curves = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny(MODELS)
        with knower(Path(folder) / "knows", model) as address:
            for seed in seeds:
                if curves and time.monotonic() - began > BUDGET_S * 0.7:
                    print(f"no time is left for seed {seed}")
                    break
                homes = [Path(folder) / f"{seed}-{name}" for name in ("alone", "joined")]
                alone.append(run(homes[0], model, seed, ROUNDS, *HERE))
                joined.append(run(homes[1], model, seed, ROUNDS, *HERE, address))
                curves.append([rewards_of(home) for home in homes])
                last = [runs[-1]["reward_last"] for runs in (alone, joined)]
                half = first_half(curves[-1][1])
                print(
                    f"seed {seed}: alone {last[0]:.3f}, joined {last[1]:.3f}, half in round {half}",
                    flush=True,
                )
    if options.picture is not None:
        options.picture.write_text(picture(*curves[0], seeds[0]))
    single = asyncio.run(first_successes(1, 8 * repeats))
    eight = asyncio.run(first_successes(NODES, repeats))
    halves = [first_half(curve) for _, curve in curves]
    claims = {
        "alone_last": max(one["reward_last"] for one in alone),
        "joined_last": min(one["reward_last"] for one in joined),
        "rounds_to_half": max(halves),
        "first_success_speedup_8": fmean(single) / fmean(eight),
    }
    spread: dict[str, Sequence[float]] = {
        "alone_last": [min(one["reward_last"] for one in alone), claims["alone_last"]],
        "joined_last": [claims["joined_last"], max(one["reward_last"] for one in joined)],
        "rounds_to_half": [min(halves), max(halves)],
        "first_success_speedup_8": [claims["first_success_speedup_8"]] * 2,
    }
    tokens = {"tokens_alone": fmean(single), "tokens_of_eight": fmean(eight), "repeats": repeats}
    extra = {"seeds": len(curves), "rounds": ROUNDS, **tokens, "cpu": machine()["cpu"]}
    report("one_finds", claims, spread, options.json, extra=extra)


def arguments() -> argparse.Namespace:
    """The options of every benchmark, `picture`, and those by which it starts the node that knows."""
    parser = argparse.ArgumentParser(description="what one finds, all know")
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the first seed's run as SVG")
    parser.add_argument("--knower", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the node that knows ----


def know(home: Path, model: Path) -> None:
    """Train on the task and two demonstrations until stopped."""
    settings = {"network.listen": "127.0.0.1", "network.mdns": False, "node.seed": 0, "node.eval_every": 0}
    sn.Node(
        TASK, model=model, home=home, preset="tiny", settings=settings, demonstrations=DEMONSTRATIONS
    ).run()


@contextlib.contextmanager
def knower(home: Path, model: Path) -> Iterator[str]:
    """The address of a node that is mostly right."""
    command = [sys.executable, __file__, "--knower", str(home), "--model", str(model)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not any(reward >= HALF for reward in rewards_of(home)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the node that was shown two demonstrations is not right: {home}")
            time.sleep(0.2)
        note = read_running(resolve_paths(home).running)
        assert note is not None
        yield note.addresses[0]
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def rewards_of(home: Path) -> list[float]:
    """The mean reward of the answers that a node sampled, by round."""
    metrics = resolve_paths(home).logs / "metrics.jsonl"
    if not metrics.exists():
        return []
    complete = metrics.read_text().rpartition("\n")[0].splitlines()
    rounds = [one for one in map(json.loads, complete) if one["event"] == "round"]
    return [one.get("reward.own") or 0.0 for one in rounds]


def first_half(rewards: Sequence[float]) -> int:
    """The first round in which half of the answers were right; one more than there are where none was."""
    return next((n for n, reward in enumerate(rewards, 1) if reward >= HALF), len(rewards) + 1)


# ---- the first success of many ----


class Rare:
    """Questions of which only the task knows the answer, a number."""

    name, version = "rare", "1"

    def examples(self, seed: int) -> Iterator[Example]:
        for index in range(4096):
            key = ExampleKey(self.name, self.version, seed, index)
            yield Example(key, f"{seed}/{index}?", {"answer": "right"})

    def score(self, example: Example, completions: Sequence[str]) -> list[dict[str, float | None]]:
        return [{"right": float(text == "right")} for text in completions]


class Sampler:
    """A node whose answers are right by chance."""

    def __init__(self, number: int, repeat: int, exchange: Exchange, author: str) -> None:
        self.exchange = exchange
        self.tokens = 0
        self.is_right = False
        self._author = author
        self._rng = random.Random(f"{repeat}/{number}")
        self._number = number
        self._task = Rare()
        self._fresh = (one for one in self._task.examples(1000 * repeat + number))
        self._tries: list[ExampleKey] = []

    async def sample(self) -> None:
        """A round: an example that somebody asked for, or one of its own; published, and help asked for."""
        if self._tries:
            key = self._tries.pop(0)
            example = next(one for one in self._task.examples(key.seed) if one.key == key)
        else:
            example = next(one for one in self._fresh if not holds_out(one))
        texts = ["right" if self._rng.random() < CHANCE else f"no {n}" for n in range(GROUP)]
        said = tuple(Completion(text, (1, 2), None, one_span(0, 2), "stop") for text in texts)
        group = RolloutGroup(example, said, tuple(self._task.score(example, texts)), self._author, 0)
        self.tokens += 2 * GROUP
        self.is_right = self.is_right or "right" in texts
        await self.exchange.publish([group])
        await self.exchange.ask_for_help([group])

    async def learn(self) -> None:
        """What others found, and what they ask for."""
        others = await self.exchange.collect(4, 0, START_S)
        self.is_right = self.is_right or any(
            max(one for one in group.rewards if one is not None) > 0 for group in others
        )
        self._tries += self.exchange.take_examples(1) if not self._tries else []


def holds_out(example: Example) -> bool:
    """Whether no node may train on it."""
    from swarmnode.tasks.task import is_held_out

    return is_held_out(example.prompt)


async def first_successes(nodes: int, repeats: int) -> list[int]:
    """Tokens that a node samples until every one of so many has a verified right answer, by repeat."""
    return [await first_success(nodes, repeat) for repeat in range(repeats)]


async def first_success(nodes: int, repeat: int) -> int:
    """The most tokens of any node until all are right."""
    network, task, clock = MemoryNetwork(), Rare(), Clock()
    async with AsyncExitStack() as stack:
        samplers: list[Sampler] = []
        hosts: list[Any] = []
        for number in range(nodes):
            key = NodeKey(bytes([number + 1]) * 32)
            host = await stack.enter_async_context(network.host(key.peer_id))
            for other in hosts:
                await host.connect(other.address)
            hosts.append(host)
            exchange = Exchange(
                host,
                key,
                {task.name: task},
                encode=lambda text, finish: (1,),
                prompt_ids=lambda text: (1,),
                settings=ExchangeSettings(swarm="bench", patience_s=PATIENCE_S),
                model_family="coin",
                model_size=1,
                clock=clock,
                rng=random.Random(number),
            )
            await stack.enter_async_context(exchange)
            samplers.append(Sampler(number, repeat, exchange, key.peer_id))
        while not all(one.is_right for one in samplers):
            clock.now += 8.0
            for one in samplers:
                if not one.is_right:
                    await one.sample()
            for one in samplers:
                await one.learn()
        return max(one.tokens for one in samplers)


class Clock:
    """Eight seconds a round, whatever it takes here."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


# ---- the picture ----

WIDTH, HEIGHT, LEFT, TOP = 640, 220, 48, 40


def picture(alone: Sequence[float], joined: Sequence[float], seed: int) -> str:
    """Sampled reward by round: a node alone, and the same one in a swarm with one that knows."""

    def line(rewards: Sequence[float], colour: str, said: str, above: int) -> str:
        step = WIDTH / max(len(rewards), 1)
        places = [(LEFT + step * n, TOP + HEIGHT * (1 - reward)) for n, reward in enumerate(rewards, 1)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        x, y = places[len(places) * 2 // 3]
        return (
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
            f'<text x="{x:.0f}" y="{y + above:.0f}" fill="{colour}" text-anchor="middle">'
            f"{escape(said)}</text>"
        )

    grid = "".join(
        f'<path d="M{LEFT} {TOP + HEIGHT * (1 - share):.0f}h{WIDTH}" stroke="#e5e5e5"/>'
        f'<text x="{LEFT - 8}" y="{TOP + HEIGHT * (1 - share) + 4:.0f}" text-anchor="end" fill="#555">'
        f"{share:g}</text>"
        for share in (0, 0.5, 1)
    )
    ticks = "".join(
        f'<text x="{LEFT + WIDTH * part:.0f}" y="{TOP + HEIGHT + 20}" text-anchor="middle" fill="#555">'
        f"{round(part * len(alone))}</text>"
        for part in (0, 0.25, 0.5, 0.75, 1)
    )
    title = "Share of right answers by round: one seed, one task, the same node twice"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 24} {TOP + HEIGHT + 32}"'
            ' font-family="sans-serif" font-size="13">',
            f'<rect width="{LEFT + WIDTH + 24}" height="{TOP + HEIGHT + 32}" fill="white"/>',
            f'<text x="{LEFT}" y="22" font-weight="bold" fill="#222">{title} (seed {seed})</text>',
            grid,
            ticks,
            line(alone, "#a04030", "alone: no answer is ever right, so nothing is learnt", -8),
            line(joined, "#2e8b57", "joined to one node that found it", 22),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
