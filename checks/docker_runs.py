"""The life of the images, once they are built: a first run, a second on the same volume, a seed, their ends.

images.py -> [docker_runs] -> containers.py
"""

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from containers import Container, new_volume
from images import Image
from report import Report
from steps import require, step

REPOSITORY = Path(__file__).resolve().parent.parent
STOP_WITHIN_S = 10.0


def run_images(report: Report, seed_image: Image, cpu: Image, work: Path) -> None:
    """The life of a node: a first run, a second on the same volume through a seed, and how they end."""
    volume, first, seeds = new_volume(cpu, work / "node"), {}, []
    with ExitStack() as running:

        def three_rounds() -> str:
            node = running.enter_context(
                Container(cpu, volume, "join", "--rounds", "3", environment=on_port())
            )
            require(node.wait() == 0, node.story[-1500:])
            first.update(json.loads(node.last_line))
            require(first["rounds"] == 3, str(first))
            require(
                any((volume / "cache/native").glob("*.so")), "the C kernels were not compiled into the volume"
            )
            return "as its user, on a read-only root: all that it writes is in /data and /tmp, kernels too"

        def start_seed() -> str:
            seeds.append(running.enter_context(seed_like_compose(seed_image, work / "seed")))
            return seeds[0].address

        alone = step(report, "cpu: join --rounds 3", three_rounds)
        if step(report, "seed: leaves its address as compose.yml has it", start_seed):
            seed = seeds[0]
            if alone:
                node = running.enter_context(
                    Container(cpu, volume, "join", seed.address, environment=on_port())
                )
                step(report, "cpu: again on its volume, through the seed", lambda: meet(node, seed, first))
                step(report, "cpu: its HEALTHCHECK", lambda: healthy(node, cpu))
                step(report, "cpu: SIGTERM ends it in order", lambda: ended(node, with_checkpoint=True))
            step(report, "seed: its HEALTHCHECK", lambda: healthy(seed, seed_image))
            step(report, "seed: SIGTERM ends it in order", lambda: ended(seed, with_checkpoint=False))
        fresh = new_volume(cpu, work / "early")
        early = running.enter_context(Container(cpu, fresh, environment=on_port()))
        step(report, "cpu: SIGTERM before it is up", lambda: ended_early(early))


class Seed(Container):
    """A running seed and the address that it left."""

    address = ""


def seed_like_compose(image: Image, place: Path) -> Seed:
    """A seed with the command of compose.yml, once its address is there."""
    port, volume = free_port(), new_volume(image, place)
    environment = {**on_port(port), "SWARMNODE_NETWORK__ANNOUNCE": f"/dns4/localhost/tcp/{port}"}
    command, file = ["sh", "-c", "exec swarmnode seed > /data/address/seed"], volume / "address/seed"
    require(
        command[2] in (REPOSITORY / "docker/compose.yml").read_text(), "compose.yml starts a seed otherwise"
    )
    seed = Seed(image, volume, entrypoint=command, environment=environment)
    seed.until(lambda: file.exists() and file.read_text().endswith("\n"), "it had an address")
    seed.address = file.read_text().strip()
    return seed


def meet(node: Container, seed: Container, first: dict[str, Any]) -> str:
    node.until(lambda: status(node).get("network", {}).get("peers", 0) >= 1, "it had met the seed")
    node.until(lambda: status(node)["progress"]["round"] > 3, "it had gone on after round 3")
    require("resumed after round 3" in node.story, node.story[-800:])
    require(status(node)["peer_id"] == first["peer"], "it has another identity than in its first run")
    seed.until(lambda: status(seed)["exchange"]["headers"] > 0, "the seed had heard of its rollouts")
    return f"{status(seed)['exchange']['headers']} of its headers at the seed"


def status(container: Container) -> dict[str, Any]:
    answer = container.execute("swarmnode", "status", "--json")
    return json.loads(answer.stdout) if answer.returncode == 0 else {}


def healthy(container: Container, image: Image) -> str:
    done = container.execute(*image.config["Healthcheck"]["Test"][1:])
    require(done.returncode == 0, done.stdout + done.stderr)
    return " ".join(image.config["Healthcheck"]["Test"][1:])


def ended(container: Container, *, with_checkpoint: bool) -> str:
    seconds = container.stop()
    require(
        container.process.returncode == 0,
        f"exit code {container.process.returncode}\n{container.story[-800:]}",
    )
    require(seconds <= STOP_WITHIN_S, f"it took {seconds:.1f} s")
    if with_checkpoint:
        summary = json.loads(container.last_line)
        require(summary["saved_round"] == summary["rounds"], f"no checkpoint of its last round: {summary}")
    return f"{seconds:.1f} s"


def ended_early(container: Container) -> str:
    container.until(lambda: "created the identity" in container.story, "it had begun")
    seconds = container.stop()
    require(container.process.returncode == 130, f"exit code {container.process.returncode}")
    require(seconds <= STOP_WITHIN_S, f"it took {seconds:.1f} s")
    return f"{seconds:.1f} s, though it is the first process of its container"


def on_port(port: int | None = None) -> dict[str, str]:
    """Loopback only, on a port of its own: the containers share the machine's network."""
    return {"SWARMNODE_NETWORK__PORT": str(port or free_port()), "SWARMNODE_NETWORK__LISTEN": "127.0.0.1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
