"""What one node found, all know: the same nodes alone, and joined to one that found it.

python benchmarks/one_finds.py [--quick] [--json FILE] [--picture FILE.svg]

`swarmnode join` processes over libp2p on loopback. The task (one_finds_task.py) pays for a right answer and
for nothing else, and the policy as built hardly ever gives one: most nodes stay at zero for hundreds of
rounds, because where no answer was right there is nothing to learn from. Some node finds it by luck: the
first of FINDERS that does goes on, and each of three others is run twice with the same seed: alone, and
joined to that one. A seed that finds it alone is told and left out, since it has nothing to show.

- `alone_last`: held-out reward of the lone nodes at their end, the best of them.
- `joined_last`: of the same nodes joined, the worst.
- `rounds_to_half`: rounds of its own until the sampled reward of a joined node is a half, the slowest.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from common import MODELS, report

from swarmnode.model.tiny import build_tiny
from swarmnode.node.process import read_running
from swarmnode.storage import resolve_paths

TASK = Path(__file__).parent / "one_finds_task.py"
FINDERS = (0, 8, 10, 11, 7, 9)
"""Seeds that are tried one after the other until one finds it."""
FINDS_BY = 120
"""Rounds that each of them has for that."""
LEARNERS = (1, 2, 3, 4, 5, 6)
"""Seeds of the others; the first that stay at zero alone are joined."""
ALONE_ROUNDS, JOINED_ROUNDS = 100, 60
FOUND = 0.8
"""Sampled reward of a node that has found it."""
PATIENCE_S = 240.0


@dataclass
class Node:
    """A `swarmnode join` process, and what it wrote down."""

    home: Path
    process: "subprocess.Popen[str]"

    @property
    def rewards(self) -> list[float]:
        """Sampled reward of each round so far."""
        path = resolve_paths(self.home).logs / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event.get("reward.own") or 0.0 for event in events if event["event"] == "round"]

    @property
    def address(self) -> str:
        """Where it can be dialled."""
        note = read_running(resolve_paths(self.home).running)
        assert note is not None, (self.home / "story.txt").read_text()
        return note.addresses[0]

    def summary(self) -> dict[str, Any]:
        """The last line of a node that ended well."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, (self.home / "story.txt").read_text()
        return json.loads(out.splitlines()[-1])

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=PATIENCE_S)


class Stage:
    """Nodes of one policy, each in a home of its own; all of them end with it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="one-finds-")))
        self._model = build_tiny(MODELS)

    def node(self, name: str, seed: int, rounds: int, *addresses: str) -> Node:
        home = self._folder / name
        home.mkdir()
        settings = {"network.listen": "127.0.0.1", "network.mdns": "false", "network.seeds": "[]"}
        command = [sys.executable, "-P", "-m", "swarmnode", "join", *addresses, "--preset", "tiny"]
        command += ["--home", str(home), "--model", str(self._model), "--task", str(TASK)]
        command += ["--rounds", str(rounds), "--seed", str(seed)]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        with (home / "story.txt").open("w") as story:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=story, text=True
            )
        node = Node(home, process)
        self._stack.callback(node.end)
        return node

    def finder(self) -> Node:
        """The first node that finds it. It goes on until the stage ends."""
        for seed in FINDERS:
            node = self.node(f"finder-{seed}", seed, 100_000)
            give_up_at = time.monotonic() + PATIENCE_S
            rewards: list[float] = []
            # Who has one right answer by then is on its way.
            while (len(rewards) < FINDS_BY or max(rewards) > 0) and time.monotonic() < give_up_at:
                rewards = node.rewards
                if max(rewards, default=0.0) >= FOUND:
                    print(f"seed {seed} found it by round {len(rewards)}", flush=True)
                    return node
                time.sleep(0.2)
            print(f"seed {seed} found nothing in {len(node.rewards)} rounds", flush=True)
            node.end()
        raise SystemExit("no node found it: there is nothing to show")


@dataclass
class Pair:
    """One seed alone, and joined."""

    seed: int
    alone: list[float]
    alone_last: float
    joined: list[float]
    joined_last: float

    @property
    def rounds_to_half(self) -> int:
        """One more than there were where it never got there."""
        halves = (number for number, reward in enumerate(self.joined, 1) if reward >= 0.5)
        return next(halves, len(self.joined) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one pair, fewer rounds alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the first pair as SVG")
    options = parser.parse_args()
    wanted, alone_rounds = (1, JOINED_ROUNDS) if options.quick else (3, ALONE_ROUNDS)
    pairs: list[Pair] = []
    by_luck: list[int] = []
    with ExitStack() as stack:
        stage = Stage(stack)
        finder = stage.finder()
        for seed in LEARNERS:
            if len(pairs) == wanted:
                break
            alone = stage.node(f"alone-{seed}", seed, alone_rounds)
            last = alone.summary()["reward_last"]
            if max(alone.rewards) > 0:
                print(f"seed {seed} found it alone, in {alone_rounds} rounds: {last:.3f}", flush=True)
                by_luck.append(seed)
                continue
            joined = stage.node(f"joined-{seed}", seed, JOINED_ROUNDS, finder.address)
            joined_last = joined.summary()["reward_last"]
            pairs.append(pair := Pair(seed, alone.rewards, last, joined.rewards, joined_last))
            told = f"alone {pair.alone_last:.3f} after {alone_rounds} rounds, joined {pair.joined_last:.3f}"
            print(f"seed {seed}: {told}, a half by round {pair.rounds_to_half}", flush=True)
    if options.picture is not None:
        options.picture.write_text(picture(pairs[0]))
    values = {
        "alone_last": [pair.alone_last for pair in pairs],
        "joined_last": [pair.joined_last for pair in pairs],
        "rounds_to_half": [float(pair.rounds_to_half) for pair in pairs],
    }
    claims = {
        "alone_last": max(values["alone_last"]),
        "joined_last": min(values["joined_last"]),
        "rounds_to_half": max(values["rounds_to_half"]),
    }
    spread = {name: (min(found), max(found)) for name, found in values.items()}
    extra = {"seeds": [pair.seed for pair in pairs], "found_alone": by_luck}
    report("one_finds", claims, spread, options.json, extra)


# ---- the picture ----

WIDTH, HEIGHT, LEFT, TOP = 620, 190, 44, 40
GREY, ALONE, JOINED = "#8a8f98", "#c0504d", "#2e8b57"


def picture(pair: Pair) -> str:
    """One node alone and joined: sampled reward by round. Readable on light and on dark ground."""
    rounds = max(len(pair.alone), len(pair.joined))

    def line(rewards: Sequence[float], colour: str) -> str:
        points = " ".join(
            f"{LEFT + WIDTH * number / rounds:.1f},{TOP + HEIGHT * (1 - reward):.1f}"
            for number, reward in enumerate(rewards, 1)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'

    def text(x: float, y: float, words: str, colour: str = GREY, **more: str) -> str:
        options = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}"{options}>{escape(words)}</text>'

    parts = [text(LEFT, 22, f"one node, seed {pair.seed}: share of its answers that are right, by round")]
    for tenth in (0, 5, 10):
        y = TOP + HEIGHT * (1 - tenth / 10)
        parts.append(f'<path d="M{LEFT} {y:.0f}h{WIDTH}" stroke="{GREY}" stroke-opacity="0.3"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tenth / 10:g}", text_anchor="end"))
    for number in range(0, rounds + 1, 20):
        x = LEFT + WIDTH * number / rounds
        parts.append(text(x, TOP + HEIGHT + 18, f"{number}", text_anchor="middle"))
    parts += [line(pair.alone, ALONE), line(pair.joined, JOINED)]
    end = LEFT + WIDTH * len(pair.joined) / rounds
    parts.append(text(end + 8, TOP + 16, "joined to a node that found it", JOINED))
    parts.append(text(LEFT + WIDTH, TOP + HEIGHT - 8, "alone", ALONE, text_anchor="end"))
    size = f'viewBox="0 0 {LEFT + WIDTH + 24} {TOP + HEIGHT + 30}"'
    style = "font-family:sans-serif;font-size:13px"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">', *parts, "</svg>\n"])


if __name__ == "__main__":
    main()
