"""What can be said about docker/ without building anything; `make docker-check` builds and runs it."""

import importlib
import importlib.util
import json
import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def dockerfile() -> Any:
    """checks/dockerfile.py, which reads a Dockerfile."""
    return module(ROOT / "checks" / "dockerfile.py")


@pytest.fixture(scope="module")
def stages(dockerfile: Any) -> dict[str, Any]:
    return {stage.name: stage for stage in dockerfile.read_stages((DOCKER / "Dockerfile").read_text())}


def said(stages: dict[str, Any], word: str) -> list[str]:
    return [rest for stage in stages.values() for step, rest in stage.steps if step == word]


def test_every_image_ends_as_a_user_that_is_not_root(stages: dict[str, Any]) -> None:
    for target in ("seed", "cpu", "cuda"):
        words = [step for step, _ in stages[target].steps]
        assert "USER" in words and "RUN" not in words[words.index("USER") :]


def test_there_is_one_volume_one_port_and_one_signal(stages: dict[str, Any]) -> None:
    assert (said(stages, "VOLUME"), said(stages, "EXPOSE")) == (["/data"], ["4001"])
    assert said(stages, "STOPSIGNAL") == ["SIGTERM"]
    assert [json.loads(rest) for rest in said(stages, "ENTRYPOINT")] == [["swarmnode"]]
    assert [json.loads(rest) for rest in said(stages, "CMD")] == [["join"], ["seed"]]


def test_the_base_can_be_chosen_and_sources_come_after_the_dependencies(stages: dict[str, Any]) -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(
        r"^ARG BASE=python:3\.1[123]-slim\n\nFROM|^ARG BASE=.*\n(.*\n)+?FROM \$\{BASE\}", text, re.M
    )
    for target in ("seed", "cpu", "cuda"):
        steps = [f"{step} {rest}" for step, rest in stages[target].steps]
        dependencies = next(at for at, step in enumerate(steps) if "requirements.py" in step)
        wheel = next(at for at, step in enumerate(steps) if "--from=wheel" in step)
        assert dependencies < wheel, "a changed source would install torch again"


def test_the_builder_is_sent_all_that_is_copied_and_no_more(stages: dict[str, Any]) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    copied = {
        word for rest in said(stages, "COPY") if not rest.startswith("--from") for word in rest.split()[:-1]
    }
    assert copied == allowed
    for pattern in copied:
        assert list(ROOT.glob(pattern)), f"{pattern} is nowhere"
    assert not any(fnmatch("docker/Dockerfile", pattern) for pattern in allowed)


def test_the_seed_gets_the_daemon_without_what_the_package_asks_for(stages: dict[str, Any]) -> None:
    (install,) = [rest for step, rest in stages["seed"].steps if step == "RUN" and "requirements.py" in rest]
    assert "pip install --no-deps -r daemon.txt" in install
    assert "requirements.py pipeline > daemon.txt" in install
    requirements = module(DOCKER / "requirements.py").requirements
    assert requirements(ROOT / "pyproject.toml", ["pipeline"]) == PROJECT["optional-dependencies"]["pipeline"]
    assert len(PROJECT["optional-dependencies"]["pipeline"]) == 1, "the daemon's package alone"


def test_requirements_are_those_of_the_manifest_in_the_order_asked_for() -> None:
    requirements = module(DOCKER / "requirements.py").requirements
    both = requirements(ROOT / "pyproject.toml", ["project", "train"])
    assert both == [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]]


def test_the_uninstalled_are_those_of_the_makefile() -> None:
    unused = re.search(r"^UNUSED := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert unused is not None
    assert f"pip uninstall -y {unused[1]}" in (DOCKER / "Dockerfile").read_text()


def test_settings_named_in_docker_exist() -> None:
    from swarmnode.settings.config import KEYS

    files = [path for path in DOCKER.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    for path in files:
        for section, key in re.findall(r"SWARMNODE_([A-Z]+)__([A-Z_]+)", path.read_text()):
            assert f"{section}.{key}".lower() in KEYS, f"{path.name}: {section}__{key}"


def test_the_unit_does_not_restart_what_only_a_person_can_mend() -> None:
    from swarmnode import errors

    unit = (DOCKER / "swarmnode.service").read_text()
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.M)
    hopeless = (errors.ConfigError, errors.IdentityError, errors.TaskError, errors.ModelError)
    assert {int(code) for code in codes.split()} == {error.exit_code for error in hopeless}


def test_health_is_asked_of_the_node_and_in_compose_as_in_the_images(stages: dict[str, Any]) -> None:
    (check,) = said(stages, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command == ["swarmnode", "status", "--healthy"]
    assert f"test: {json.dumps(['CMD', *command])}" in (DOCKER / "compose.yml").read_text()


def test_steps_are_read_as_docker_reads_them(dockerfile: Any) -> None:
    first = "ARG BASE=x\n# a comment\nFROM ${BASE} AS one\nENV A=1 \\\n    # why\n    B=2\nRUN a \\\n  && b\n"
    one, two = dockerfile.read_stages(f"{first}FROM one AS two\n")
    assert (one.name, one.base, two.base) == ("one", "${BASE}", "one")
    assert one.steps == [("ENV", "A=1 B=2"), ("RUN", "a && b")]


def test_checks_have_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "report", module(ROOT / "checks" / "report.py"))
    steps = module(ROOT / "checks" / "steps.py")
    report = sys.modules["report"].Report()
    assert steps.step(report, "well", lambda: "a note")
    assert not steps.step(report, "badly", lambda: steps.require(False, "what is wrong"))
    assert report.finish() == 1
