"""Runs an image's command as `docker run --read-only --tmpfs /tmp` would: own processes and mounts, its user.

images.py -> [Container] -> docker_check.py

The command is the first process of its own process namespace, as in a container: signals that it does not
handle do not reach it. Its root is read-only, so whatever it writes it can only write to /data and /tmp. The
network is the machine's: loopback is shared, and Docker's own network is not looked at.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil
from images import Image, user_ids
from steps import StepFailed, run

PATIENCE_S = 300.0
"""For anything that a busy machine may take long over."""

ENTER_S = 30.0
"""From its start until the command is in its root: a handful of mounts."""

START = """
set -e
mount --bind "$1" "$1"; mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"; mount --bind "$2" "$1/data"
for file in /etc/hosts /etc/resolv.conf; do [ ! -e "$1$file" ] || mount --bind $file "$1$file"; done
mount -o remount,bind,ro "$1"
root=$1; ids=$3; shift 3
exec chroot --userspec="$ids" "$root" env -i "$@"
"""


def new_volume(image: Image, place: Path) -> Path:
    """A named volume at its first use: it takes over what the image has there, the owner above all."""
    run(["cp", "-a", image.root / "data", place])
    return place


class Container:
    """A running container. `with Container(...)` ends it, whatever becomes of the check."""

    def __init__(
        self,
        image: Image,
        volume: Path,
        *command: str,
        entrypoint: list[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`command` stands in the place of the image's CMD."""
        number, group, home = user_ids(image)
        self._ids = f"{number}:{group}"
        variables = {"HOME": home, **image.environment, **(environment or {})}
        self._env = ["-C", image.config["WorkingDir"], *(f"{k}={v}" for k, v in variables.items())]
        words = [*(entrypoint or image.config["Entrypoint"]), *(command or image.config["Cmd"])]
        if entrypoint:
            words = [*entrypoint, *command]
        self._out, self._err = (volume.with_name(f"{volume.name}.{end}") for end in ("stdout", "stderr"))
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "sh", "-c", START, "sh",
                 str(image.root), str(volume), self._ids, *self._env, *words],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def story(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return (self._out.read_text().splitlines() or [""])[-1]

    def first_process(self) -> int:
        """The command's process id, as the machine counts; waits until it is inside of its root."""
        deadline = time.monotonic() + ENTER_S
        while self.process.poll() is None and time.monotonic() < deadline:
            for child in psutil.Process(self.process.pid).children():
                if os.readlink(f"/proc/{child.pid}/root") != "/":
                    return child.pid
            time.sleep(0.05)
        raise StepFailed(f"the container is gone:\n{self.story[-800:]}")

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """`docker exec`: a command beside the first one, as the same user."""
        number, group = self._ids.split(":")
        enter = ["nsenter", "-t", str(self.first_process()), "-m", "-p", "-r", "-S", number, "-G", group]
        words = [*enter, "env", "-i", *self._env, *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None:
                raise StepFailed(f"it ended before {what}:\n{self.story[-800:]}")
            if time.monotonic() > deadline:
                raise StepFailed(f"{PATIENCE_S:.0f} s, and not yet {what}:\n{self.story[-800:]}")
            time.sleep(0.2)

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise StepFailed(f"it has not ended in {PATIENCE_S:.0f} s:\n{self.story[-800:]}") from None

    def stop(self) -> float:
        """`docker stop`: seconds from SIGTERM to its end."""
        started = time.monotonic()
        os.kill(self.first_process(), signal.SIGTERM)
        self.wait()
        return time.monotonic() - started
