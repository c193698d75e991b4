"""The places of a node's files, and safe writing: a reader finds the old or the new file, even after a power
cut."""

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from swarmnode.errors import SwarmnodeError

T = TypeVar("T")

logger = logging.getLogger(__name__)

# ---- places ----


@dataclass(frozen=True, slots=True)
class Paths:
    """The folders of one node. None is created until it is written to."""

    config: Path
    data: Path
    state: Path
    cache: Path

    @property
    def home(self) -> Path | None:
        """Folder that contains all of these. None: they follow XDG."""
        root = self.cache.parent
        return root if (self.config, self.cache) == (root / "config", root / "cache") else None

    @property
    def user_config(self) -> Path:
        return self.config / "config.toml"

    @property
    def swarms(self) -> Path:
        """Folder with a key file for each private swarm that this home belongs to."""
        return self.config / "swarms"

    @property
    def identity(self) -> Path:
        return self.data / "identity" / "node.key"

    @property
    def model_choice(self) -> Path:
        """File with the choice of `--model auto` at the first start."""
        return self.data / "model"

    @property
    def checkpoints(self) -> Path:
        return self.data / "checkpoints"

    @property
    def peers(self) -> Path:
        return self.state / "peers.json"

    def met_members(self, swarm: str) -> Path:
        """Returns the file with the members met in a private swarm."""
        return self.state / "swarms" / f"{swarm}.json"

    @property
    def exchange_record(self) -> Path:
        """File with the record of other nodes and their worth, kept across restarts."""
        return self.state / "exchange.record"

    @property
    def library(self) -> Path:
        """File with the groups whose answers this node's book holds, as their authors signed them
        (exchange/library/)."""
        return self.data / "library.jsonl"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def running(self) -> Path:
        """File written while a node runs, with pid and local HTTP port, for `swarmnode status`."""
        return self.state / "running.json"

    @property
    def models(self) -> Path:
        return self.cache / "models"

    def policy(self, number: int) -> "Paths":
        """Returns the folders of one of several policies. The first has those of a single one; all share
        settings and cache."""
        if number == 0:
            return self
        return replace(
            self, data=self.data / "policies" / str(number), state=self.state / "policies" / str(number)
        )

    def policies(self) -> "list[Paths]":
        """Returns the folders of all policies that have ever run here, always including the first one's."""
        folders = (folder for root in (self.data, self.state) for folder in (root / "policies").glob("*"))
        numbers = sorted({int(folder.name) for folder in folders if folder.name.isdecimal()} - {0})
        return [self, *map(self.policy, numbers)]


def resolve_paths(home: Path | None = None, environ: Mapping[str, str] | None = None) -> Paths:
    """Returns the folders for `--home`, else SWARMNODE_HOME, else XDG.

    >>> resolve_paths(Path("/data")).identity.as_posix()
    '/data/data/identity/node.key'
    """
    env = os.environ if environ is None else environ
    if home is None and env.get("SWARMNODE_HOME"):
        home = Path(env["SWARMNODE_HOME"])
    if home is not None:
        root = home.expanduser().absolute()
        return Paths(config=root / "config", data=root / "data", state=root / "state", cache=root / "cache")

    def xdg(variable: str, fallback: str) -> Path:
        return Path(env.get(variable) or Path.home() / fallback) / "swarmnode"

    return Paths(
        config=xdg("XDG_CONFIG_HOME", ".config"),
        data=xdg("XDG_DATA_HOME", ".local/share"),
        state=xdg("XDG_STATE_HOME", ".local/state"),
        cache=xdg("XDG_CACHE_HOME", ".cache"),
    )


def builtin_folder(name: str) -> Path:
    """Returns the folder `rewards`, `configs` or `docker` (in a wheel, only swarmnode.service): inside the
    wheel, or at the repository's root in an editable install."""
    package = Path(__file__).parents[1]
    packed = package / "_builtin" / name
    return packed if packed.is_dir() else package.parent / name


# ---- writing ----


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replaces a file by renaming another one: a reader never sees half of it, and a crash leaves the old
    one. `mode`: its permissions from the start. Raises OSError with the file's name, also if there is a
    device in its place."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it exists and is not a file", str(path))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        sync(aside)
        aside.replace(path)
    except OSError as error:
        error.filename = str(path)  # The error of a write to a full disk does not name the file.
        raise
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def read_kept(path: Path, what: str, read: Callable[[bytes], T], most_bytes: int) -> T | None:
    """Returns what `read` makes of a file from an earlier start, or None if there is none or it is damaged. A
    damaged file becomes `<name>.damaged`, with a warning that calls it `what`."""
    try:
        with path.open("rb") as file:
            return read(file.read(most_bytes + 1))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError, SwarmnodeError) as error:
        logger.warning("%s: damaged; moved aside, starting without it: %s (%s)", what, error, path)
    try:
        path.replace(path.with_name(f"{path.name}.damaged"))
    except OSError as error:
        logger.warning("cannot move the damaged file %s aside: %s", path, error.strerror)
    return None


@contextmanager
def whole_folder(target: Path, *, replaces: bool = True) -> Generator[Path]:
    """Yields a folder to fill, which becomes `target` at the end and replaces an earlier one: it is there
    completely or not at all. Without `replaces` an earlier one stays: raises FileExistsError."""
    aside, old = (target.with_name(f".{target.name}.{os.getpid()}{end}") for end in ("", ".old"))
    try:
        make_folder(target.parent)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        sync(aside)
        if target.exists():
            if not replaces:
                raise FileExistsError(errno.EEXIST, "it already exists", str(target))
            target.rename(old)
        try:
            aside.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def discard(folder: Path) -> None:
    """Deletes a folder, renamed first so that nobody sees half of it. Undeletable files stay."""
    going = folder.with_name(f".{folder.name}.{os.getpid()}")
    with suppress(OSError):
        folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Writes a file piece by piece, waits until it is on disk, and returns the SHA-256 of its content."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, whatever its size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_bytes(folder: Path) -> int:
    """Returns the total size of the files in a folder, in bytes."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            # A running node may be deleting it.
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents, so that their names survive a power cut as well, and only we can look
    into them (0700, as the XDG Base Directory Specification asks): a home holds rollouts and chats."""
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
            sync(path.parent)
