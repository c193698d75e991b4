"""Draw the panel of a running node as an SVG picture: `python docs/panel.py HOME docs/panel.svg`.

The picture in the README was made with it, from a real swarm; nothing in it is invented.
"""

import json
import sys
import time
import urllib.request
from io import StringIO
from pathlib import Path

import msgspec
from rich.console import Console

from swarmnode.extensions.panel.live_panel import HISTORY_ROUNDS, LOG_LINES
from swarmnode.extensions.panel.node_panel import NodePanel
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import read_running
from swarmnode.node.showing.node_status import NodeStatus

WIDTH = 118


def main() -> None:
    paths = resolve_paths(Path(sys.argv[1]))
    note = read_running(paths.running)
    if note is None:
        raise SystemExit(f"no node is running on {sys.argv[1]}")
    with urllib.request.urlopen(f"http://{note.http_host}:{note.http_port}/status", timeout=5) as answer:
        status = msgspec.json.decode(answer.read(), type=NodeStatus)
    rounds = (paths.logs / "metrics.jsonl").read_text().splitlines()[-HISTORY_ROUNDS:]
    rewards = [own for line in rounds if (own := json.loads(line).get("reward.own")) is not None]
    log = [line.split(" ", 3) for line in (paths.logs / "node.log").read_text().splitlines()[-LOG_LINES:]]
    console = Console(width=WIDTH, record=True, file=StringIO())
    console.print(NodePanel(status, rewards, [f"{line[0]} {line[-1]}" for line in log], time.time()))
    console.save_svg(sys.argv[2], title="swarmnode join")


if __name__ == "__main__":
    main()
