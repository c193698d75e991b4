"""Runs the steps of a Dockerfile in copies of one root, for machines where buildah cannot be had.

docker/Dockerfile -> [read_stages] -> [build_by_hand] -> root, configuration -> images.py

Only the instructions that our Dockerfile has; any other is an error, so that nothing is skipped in silence.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def read_stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile in their order, comments and line ends taken out.

    >>> [(stage.name, stage.base, stage.steps) for stage in read_stages("FROM a AS b\\nRUN x \\\\\\n  y")]
    [('b', 'a', [('RUN', 'x y')])]
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for step in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if not step.strip():
            continue
        word, _, rest = step.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name.strip(), base.strip()))
        elif stages:
            stages[-1].steps.append((word, rest.strip()))
    return stages


def build_by_hand(
    context: Path,
    debian: Path,
    target: str,
    work: Path,
    mounts: Sequence[tuple[Path, str]],
    arguments: Mapping[str, str],
    run: Callable[..., str],
) -> tuple[Path, dict[str, Any], str]:
    """Root, configuration and story of a target, with every stage that it stands on or copies from."""
    stages = {stage.name: stage for stage in read_stages((context / "docker/Dockerfile").read_text())}
    roots: dict[str, tuple[Path, dict[str, Any]]] = {}
    said: list[str] = []

    def stage_root(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in roots:
            roots[name] = make(stages[name])
        return roots[name]

    def make(stage: Stage) -> tuple[Path, dict[str, Any]]:
        root = work / stage.name
        root.parent.mkdir(parents=True, exist_ok=True)
        below, config = stage_root(stage.base) if stage.base in stages else (debian, _empty())
        run(["cp", "-a", "--reflink=auto", below, root])
        config = json.loads(json.dumps(config))
        given: dict[str, str] = {}
        for word, rest in stage.steps:
            said.append(f"{stage.name}: {word} {rest}")
            match word:
                case "ENV":
                    pairs = (pair.partition("=") for pair in shlex.split(rest))
                    config["Env"] = [*config["Env"], *(f"{k}={_filled(v, config)}" for k, _, v in pairs)]
                case "ARG":
                    name, _, default = rest.partition("=")
                    given |= (
                        {name: arguments.get(name, default.strip('"'))}
                        if default or name in arguments
                        else {}
                    )
                case "RUN":
                    _run_step(root, rest, [*config["Env"], *(f"{k}={v}" for k, v in given.items())],
                              config["WorkingDir"], mounts, run)  # fmt: skip
                case "COPY":
                    _copy(rest, context, root, config["WorkingDir"], lambda name: stage_root(name)[0], run)
                case "WORKDIR":
                    config["WorkingDir"] = rest
                    (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
                case "USER":
                    config["User"] = rest
                case "VOLUME":
                    config["Volumes"][rest] = {}
                case "EXPOSE":
                    config["ExposedPorts"][f"{rest}/tcp"] = {}
                case "HEALTHCHECK":
                    config["Healthcheck"] = {"Test": ["CMD", *json.loads(rest.partition("CMD ")[2])]}
                case "STOPSIGNAL":
                    config["StopSignal"] = rest
                case "ENTRYPOINT" | "CMD":
                    config["Entrypoint" if word == "ENTRYPOINT" else "Cmd"] = json.loads(rest)
                case _:
                    raise NotImplementedError(f"{word} {rest}")
        return root, config

    root, config = stage_root(target)
    return root, config, "\n".join(said)


def _empty() -> dict[str, Any]:
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"Env": [path], "WorkingDir": "/", "User": "", "Volumes": {}, "ExposedPorts": {}}


def _filled(value: str, config: Mapping[str, Any]) -> str:
    known = dict(line.split("=", 1) for line in config["Env"])
    return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), value)


STEP = """
set -e
mount --bind "$1" "$1"; mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"
root=$1; shift
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$root${2%/*}"; touch "$root$2"; fi
    mount --bind "$1" "$root$2"; shift 2
done
shift
exec chroot "$root" env -i "$@"
"""


def _run_step(
    root: Path,
    step: str,
    env: Sequence[str],
    folder: str,
    mounts: Sequence[tuple[Path, str]],
    run: Callable[..., str],
) -> None:
    places = [str(part) for mount in mounts for part in mount]
    command = ["-C", folder, *env, "/bin/sh", "-c", step]
    run(["unshare", "--mount", "sh", "-c", STEP, "sh", root, *places, "--", *command], 600)


def _copy(
    rest: str, context: Path, root: Path, folder: str, stage: Callable[[str], Path], run: Callable[..., str]
) -> None:
    words = rest.split()
    source = context
    if words[0].startswith("--from="):
        source = stage(words.pop(0).partition("=")[2])
    *patterns, destination = words
    place = root / Path(folder, destination).as_posix().lstrip("/")
    found = [path for pattern in patterns for path in sorted(source.glob(pattern.lstrip("/")))]
    for path in found:
        # A folder's content is copied, a file into the folder.
        place.mkdir(parents=True, exist_ok=True) if path.is_dir() or destination.endswith("/") else None
        run(["cp", "-a", f"{path}/." if path.is_dir() else path, place])
