"""Builds the images of docker/Dockerfile on a machine without Docker: buildah on a root made by debootstrap.

debootstrap -> base image -> buildah bud -> [Workshop] -> Image -> containers.py, docker_check.py
without buildah: debootstrap -> dockerfile.py runs the same steps in copies of that root -> Image

No base image can be pulled on the machines that build this: Debian's own Python stands in for the slim one.
The root is kept between runs, everything else goes with the workshop.
"""

import json
import os
import pwd
import shutil
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from dockerfile import build_by_hand
from steps import StepFailed, run

DEBIAN = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
TOOLS_TIMEOUT_S = 240
ROOT_TIMEOUT_S = 400
BUILD_TIMEOUT_S = 600
BASE = "localhost/swarmnode-base"


@dataclass(frozen=True)
class Image:
    """A built image: its files as a folder, and its configuration in Docker's words (Entrypoint, User)."""

    root: Path
    config: dict[str, Any]
    size_mb: float

    @property
    def environment(self) -> dict[str, str]:
        pairs = (line.partition("=") for line in self.config["Env"])
        return {name: value for name, _, value in pairs}


def have(tool: str) -> bool:
    return shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin") is not None


def install_tools(*tools: str) -> str | None:
    """Debian packages of these names, as far as they are missing; what is in the way otherwise."""
    missing = [tool for tool in tools if not have(tool)]
    if not missing:
        return None
    if os.geteuid() != 0 or not have("apt-get"):
        return f"{' and '.join(missing)} missing, and only root can install them with apt-get"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["apt-get", "update", "-q"], TOOLS_TIMEOUT_S, env=environment)
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
        run(command, TOOLS_TIMEOUT_S, env=environment)
    except StepFailed as error:
        return f"apt-get could not install {' and '.join(missing)}:\n{error}"
    return None


def debian_root(cache: Path) -> Path:
    """A Debian with Python and nothing else, made once. Raises StepFailed."""
    root = cache / f"{DEBIAN}-{PACKAGES.replace(',', '-')}"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache.stat().st_uid != os.geteuid():
        raise StepFailed(f"{cache} belongs to somebody else")
    if not root.exists():
        unfinished = cache / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, unfinished]
        run(command, ROOT_TIMEOUT_S)
        shutil.rmtree(unfinished / "var/cache/apt/archives", ignore_errors=True)
        (unfinished / "var/cache/apt/archives/partial").mkdir(parents=True)
        unfinished.rename(root)
    return root


def machine_mounts(work: Path) -> list[Path | tuple[Path, str]]:
    """What a RUN step needs to see of this machine: certificates and pip's settings, with the folders that
    those name."""
    settings, seen = ConfigParser(interpolation=None), [Path("/etc/ssl/certs")]
    settings["global"] = {}
    for line in run(["python3", "-m", "pip", "config", "list"]).splitlines():
        key, _, value = line.partition("=")
        name, value = key.rpartition(".")[2], value.strip("'\"").replace("\\n", "\n")
        settings["global"][name] = value
        for word in value.split():
            path = Path(urlparse(word).path)
            if path.is_absolute() and path.exists() and (word.startswith(("file:", "/"))):
                seen.append(path.parent if path.name == "simple" else path)
    file = work / "pip.conf"
    with file.open("w") as stream:
        settings.write(stream)
    beside = [path for path in dict.fromkeys(seen) if not path.is_relative_to("/etc/ssl/certs")]
    return [Path("/etc/ssl/certs"), *beside, (file, "/etc/pip.conf")]


class Workshop:
    """Images of one checkout, built in `work`, which the caller removes after `close`."""

    def __init__(self, repository: Path, work: Path, root: Path, *, buildah: bool) -> None:
        self.repository = repository
        self.work = work
        self.root = root
        self.uses_buildah = buildah
        self._mounted: list[str] = []
        driver = "overlay" if _overlay_works(work) else "vfs"
        self._environment = {**os.environ, "STORAGE_DRIVER": driver, "BUILDAH_ISOLATION": "chroot"}
        self.storage = driver if buildah else "copies of one root"
        if buildah:
            self._make_base()

    def build(self, target: str, *, context: Path | None = None, **arguments: str) -> tuple[Image, str]:
        """The image of a target, and what the builder said. Raises StepFailed."""
        mounts = machine_mounts(self.work)
        context = context or self.repository
        pairs = [mount if isinstance(mount, tuple) else (mount, str(mount)) for mount in mounts]
        if not self.uses_buildah:
            root, config, said = build_by_hand(
                context, self.root, target, self.work / f"by-hand-{target}", pairs, arguments, run
            )
            return Image(root, config, _size_mb(root)), said
        name = f"localhost/swarmnode-{target}"
        said = self._buildah(
            "bud", "--layers", "--format", "docker", "--pull-never", "--network=host",
            *(f"--volume={source}:{place}:ro" for source, place in pairs),
            *(f"--build-arg={key}={value}" for key, value in {"BASE": BASE, **arguments}.items()),
            "--file", str(context / "docker/Dockerfile"), "--target", target, "--tag", name, str(context),
        )  # fmt: skip
        return self._mount(name), said

    def close(self) -> None:
        """Unmount what was built, so that `work` can be removed."""
        for container in self._mounted:
            self._buildah("umount", container)
        if self.uses_buildah:
            self._buildah("rm", "--all")
            self._buildah("rmi", "--all", "--force")

    def _make_base(self) -> None:
        container = self._buildah("from", "scratch").strip()
        self._buildah("add", "--quiet", container, str(self.root), "/")
        self._buildah("commit", "--quiet", "--rm", container, BASE)

    def _mount(self, name: str) -> Image:
        inspected = json.loads(self._buildah("inspect", "--type", "image", name))
        container = self._buildah("from", "--pull-never", name).strip()
        self._mounted.append(container)
        root = Path(self._buildah("mount", container).strip())
        return Image(root, inspected["Docker"]["config"], _size_mb(root))

    def _buildah(self, *words: str) -> str:
        place = ["--root", str(self.work / "storage"), "--runroot", str(self.work / "running")]
        return run(["buildah", *place, *words], BUILD_TIMEOUT_S, env=self._environment)


def user_ids(image: Image) -> tuple[int, int, str]:
    """Number, group and home of the image's user, by the image's own /etc/passwd."""
    name = image.config.get("User") or "root"
    for line in (image.root / "etc/passwd").read_text().splitlines():
        entry = pwd.struct_passwd(line.split(":"))
        if name in (entry.pw_name, entry.pw_uid):
            return int(entry.pw_uid), int(entry.pw_gid), entry.pw_dir
    raise StepFailed(f"there is no user {name} in the image")


def _overlay_works(work: Path) -> bool:
    """Without it each layer is a copy of all files below it."""
    lower, upper, inner, merged = (work / "overlay" / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, inner, merged):
        folder.mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={inner}"
    try:
        run(["mount", "-t", "overlay", "overlay", "-o", options, merged])
        run(["umount", merged])
    except StepFailed:
        return False
    return True


def _size_mb(root: Path) -> float:
    return int(run(["du", "-s", "-x", "-B1", root]).split()[0]) / 1e6
