"""Builds and runs what docker/ promises, on a machine without Docker. `make docker-check`; needs root.

docker/ -> [docker_check] -> docker_files.py, images.py, docker_runs.py -> report.py

Checked beside the images: compose.yml against the schema of the compose specification, the unit by
systemd-analyze. What the `cuda` target installs is resolved by `make install-check`. What is not run here is
printed at the end.
"""

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from docker_files import check_compose, check_unit
from docker_runs import run_images
from images import Image, Workshop, debian_root, install_tools
from report import Report
from steps import require, run, step

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(f"/var/tmp/swarmnode-docker-check-{os.getuid()}")
MOST_MB = {"seed": 430, "cpu": 2300}
"""Sizes of the images with Debian's Python below; docker/README.md states what they are."""
NOT_RUN = (
    "Docker itself: its builder, its network between containers (its names) and to the outside (-p)",
    "cuda: the download and installation of torch with CUDA and vLLM, and a GPU handed to a container",
    "python:3.12-slim and any other base image: Debian's Python stood in for it",
    "swarmnode.service under a running systemd",
    "Prometheus and Grafana of the profile observability",
)


def main() -> int:
    """Run every step; the exit code is 0 when all passed."""
    report = Report()
    with (
        tempfile.TemporaryDirectory(prefix="swarmnode-docker-", dir="/var/tmp") as folder,
        ExitStack() as stack,
    ):
        work = Path(folder)
        beside = stack.enter_context(ThreadPoolExecutor(1))
        comparing = beside.submit(
            step, report, "compose.yml has the shape of its specification", lambda: check_compose(work)
        )
        step(report, "swarmnode.service passes systemd-analyze verify", lambda: check_unit(work))
        workshop: list[Workshop] = []

        def open_it() -> str:
            workshop.append(open_workshop(report, work))
            return workshop[0].storage

        step(report, "a root and a builder", open_it)
        if workshop:
            stack.callback(step, report, "nothing is left but the cached root", workshop[0].close)
            check_images(report, workshop[0], work)
        comparing.result()
    report.say("not run here:")
    for what in NOT_RUN:
        report.say(f"  {what}")
    return report.finish()


def open_workshop(report: Report, work: Path) -> Workshop:
    require(os.geteuid() == 0, "building and running images takes root here (mounts, chroot)")
    problem = install_tools("debootstrap")
    require(problem is None, f"no clean root to build in: {problem}")
    no_buildah = install_tools("buildah")
    if no_buildah is not None:
        report.say(f"no buildah, so the Dockerfile's steps are run one by one in a clean root: {no_buildah}")
    return Workshop(REPOSITORY, work, debian_root(CACHE), buildah=no_buildah is None)


def check_images(report: Report, workshop: Workshop, work: Path) -> None:
    images: dict[str, Image] = {}

    def build(target: str) -> str:
        images[target] = workshop.build(target)[0]
        size_mb = images[target].size_mb
        with_cuda = any(images[target].root.glob("opt/swarmnode/lib/python*/site-packages/nvidia"))
        require(with_cuda or size_mb <= MOST_MB[target], f"{size_mb:.0f} MB, at most {MOST_MB[target]}")
        build = ", with torch's CUDA build, as this index has it" if with_cuda else ""
        return f"{size_mb:.0f} MB, of which the base is {_base_mb(workshop):.0f}{build}"

    for target in ("seed", "cpu"):
        if step(report, f"{target}: builds", lambda target=target: build(target)):
            step(
                report,
                f"{target}: user, volume, port, health, stop",
                lambda t=target: check_config(images[t], t),
            )
    step(report, "cuda: its steps run, pip resolving only", lambda: check_cuda_steps(workshop))
    if workshop.uses_buildah and "cpu" in images:
        step(report, "a changed source does not install torch again", lambda: check_layers(workshop, work))
    if len(images) == 2:
        run_images(report, images["seed"], images["cpu"], work)


def _base_mb(workshop: Workshop) -> float:
    return int(run(["du", "-s", "-x", "-B1", workshop.root]).split()[0]) / 1e6


def check_config(image: Image, target: str) -> str:
    config = image.config
    require(config["User"] not in ("", "root", "0"), f"it runs as {config['User'] or 'root'}")
    require(list(config["Volumes"]) == ["/data"], f"volumes {list(config['Volumes'])}")
    require(list(config["ExposedPorts"]) == ["4001/tcp"], f"ports {list(config['ExposedPorts'])}")
    require(config["Healthcheck"]["Test"][:1] == ["CMD"], "no health check")
    require(config["StopSignal"] == "SIGTERM", f"stop signal {config.get('StopSignal')}")
    command = (config["Entrypoint"], config["Cmd"])
    require(command == (["swarmnode"], ["seed" if target == "seed" else "join"]), f"it starts {command}")
    environment = image.environment
    outside = [
        name for name in ("SWARMNODE_HOME", "XDG_CACHE_HOME") if not environment[name].startswith("/data")
    ]
    require(not outside, f"outside of the volume: {outside}")
    packages = {path.name for path in image.root.glob("opt/swarmnode/lib/python*/site-packages/*")}
    require(("torch" in packages) == (target == "cpu"), f"torch in the image: {'torch' in packages}")
    require(
        (image.root / "usr/bin/gcc").exists() == (target == "cpu"), "a compiler belongs into cpu, only there"
    )
    return f"user {config['User']}"


def check_cuda_steps(workshop: Workshop) -> str:
    image, _ = workshop.build("cuda", EXTRAS="train", PIP_DRY_RUN="1")
    require(image.environment["NVIDIA_VISIBLE_DEVICES"] == "all", "no GPU would be handed to it")
    require(image.config["User"] == "swarmnode", "it runs as root")
    return "nothing was downloaded or installed by them"


def check_layers(workshop: Workshop, work: Path) -> str:
    """Build `cpu` again from a copy whose only difference is a line of a source file."""
    changed = work / "changed"
    keep = shutil.ignore_patterns(".git", ".venv", "__pycache__", "built", ".*_cache", "shared")
    shutil.copytree(REPOSITORY, changed, ignore=keep)
    with (changed / "swarmnode/__init__.py").open("a") as source:
        source.write("\n# changed\n")
    _, said = workshop.build("cpu", context=changed)
    lines = said.splitlines()
    at = max(number for number, line in enumerate(lines) if "project train" in line)
    require(
        "Using cache" in "\n".join(lines[at : at + 3]),
        f"after: {lines[at]}\n" + "\n".join(lines[at + 1 : at + 4]),
    )
    return "the layer with torch came from the cache"


if __name__ == "__main__":
    sys.exit(main())
