"""The kernels are compiled once, by whatever compiler there is, and nothing but speed is lost without."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swarmnode.extensions.native import compiler, passes

KERNELS = compiler.library()
needs_compiler = pytest.mark.skipif(KERNELS is None, reason="no C compiler on this machine")
ONES = torch.ones(2, 3)
TO_OUTPUT = 'while [ "$1" != -o ]; do shift; done\n'
"""Shell: the file to be made is $2 now."""
PROBE = """
import logging, sys
from pathlib import Path
from swarmnode.extensions.native import compiler
logging.basicConfig(level=logging.INFO)
compiler._folder = lambda name: Path(sys.argv[1])
compiler.find_compiler = lambda: Path(sys.argv[2])
print(compiler.library() is not None)
"""
"""What a new process makes of a folder and a compiler."""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """As if this process had not asked yet; the folder that it compiles into."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(compiler, "_asked", False)
    monkeypatch.setattr(compiler, "_loaded", None)
    monkeypatch.setattr(compiler, "_off", False)
    monkeypatch.setattr(compiler, "_folder", lambda name: tmp_path / "built")
    return tmp_path / "built"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """The one compiler of this machine is this shell script from here on."""

    def make(body: str, name: str = "cc") -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        return path

    return make


def copying(calls: Path, before: str = "") -> str:
    """A compiler that is quick: it counts its calls in a file and copies what another one made."""
    assert KERNELS is not None
    return f'echo call >> "{calls}"\n{before}\n{TO_OUTPUT}cp "{KERNELS._name}" "$2"'


def in_a_new_process(folder: Path, made_by: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROBE, str(folder), str(made_by)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_without_a_compiler_there_are_no_kernels_and_the_log_says_so_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.find_compiler() is None
    assert [compiler.library() for _ in range(3)] == [None] * 3
    assert not passes.fits(ONES)
    (record,) = caplog.records
    assert "no C compiler" in record.getMessage() and record.levelno == logging.INFO
    assert not fresh.exists()


def test_what_a_compiler_that_fails_has_to_say_is_told_once(
    fresh: Path, script: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = script("echo 'cc: what is a header?' >&2\nexit 1")
    assert [compiler.library() for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert "what is a header?" in record.getMessage() and str(path) in record.getMessage()
    assert list(fresh.iterdir()) == [], "nothing half done"


def test_a_compiler_may_complain_in_any_bytes(
    fresh: Path, script: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    script(r"printf 'unzul\344ssig' >&2; exit 1")
    assert compiler.library() is None
    assert "unzul" in caplog.text


def test_a_compiler_that_cannot_be_run_is_told_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cc").write_text("no program")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [compiler.library() for _ in range(2)] == [None] * 2
    (record,) = caplog.records
    assert "cannot compile" in record.getMessage()


def test_a_compiler_that_hangs_is_given_up(
    fresh: Path,
    script: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compiler, "TIMEOUT_S", 0.1)
    script("exec sleep 5")
    assert compiler.library() is None
    assert "timed out" in caplog.text
    assert list(fresh.iterdir()) == []


def test_a_compiler_that_makes_no_library_is_told(
    fresh: Path, script: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    script(f'{TO_OUTPUT}echo "no library" > "$2"')
    assert compiler.library() is None
    assert "cannot compile" in caplog.text


def test_a_folder_that_cannot_be_made_is_told(
    fresh: Path, script: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    script("exit 0")
    fresh.write_text("a file")
    assert compiler.library() is None
    assert "cannot compile" in caplog.text


@needs_compiler
def test_a_library_is_compiled_once_and_found_again(
    fresh: Path, script: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = script(copying(tmp_path / "calls"))
    first = compiler.compiled(path, fresh)
    assert compiler.compiled(path, fresh) == first
    assert (tmp_path / "calls").read_text() == "call\n"
    assert list(fresh.iterdir()) == [first]
    assert [record.getMessage() for record in caplog.records] == [
        f"compiled the CPU kernels with {path} (once)"
    ]
    assert compiler.library() is not None and passes.fits(ONES)


@needs_compiler
def test_another_compiler_source_flag_or_cpu_makes_another_file(
    fresh: Path, script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = script(copying(tmp_path / "calls"))
    names = [compiler.compiled(path, fresh).name]
    other = script(copying(tmp_path / "calls", "# of another version"), "gcc")
    names.append(compiler.compiled(other, fresh).name)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "cpu_flags", lambda: frozenset({"sse2"}))
        names.append(compiler.compiled(path, fresh).name)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
        names.append(compiler.compiled(path, fresh).name)
    sources = tmp_path / "kernels"
    sources.mkdir()
    for source in compiler.SOURCES.iterdir():
        (sources / source.name).write_text(source.read_text())
    monkeypatch.setattr(compiler, "SOURCES", sources)
    assert compiler.compiled(path, fresh).name == names[0], "wherever the sources lie"
    (sources / "norm.h").write_text((sources / "norm.h").read_text() + "\n")
    names.append(compiler.compiled(path, fresh).name)
    path.write_text(path.read_text() + "# updated\n")
    names.append(compiler.compiled(path, fresh).name)
    assert len(set(names)) == len(names) == 6
    assert (tmp_path / "calls").read_text() == "call\n" * 6


@needs_compiler
@pytest.mark.parametrize("left", [b"", b"something else"], ids=["empty", "no library"])
def test_a_damaged_library_is_compiled_again(
    left: bytes, fresh: Path, script: Callable[..., Path], tmp_path: Path
) -> None:
    """As a machine that lost its power leaves it. In a process of its own, since to load one may end it."""
    path = script(copying(tmp_path / "calls"))
    library = compiler.compiled(path, fresh)
    library.write_bytes(left)
    process = in_a_new_process(fresh, path)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and said.splitlines()[-1:] == ["True"], said


@needs_compiler
def test_two_processes_that_compile_at_once_both_get_their_kernels(
    fresh: Path, script: Callable[..., Path], tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    # Neither is done before both have begun.
    wait = f'for _ in $(seq 300); do [ "$(wc -l < "{calls}")" -ge 2 ] && break; sleep 0.1; done'
    path = script(copying(calls, wait))
    processes = [in_a_new_process(fresh, path) for _ in range(2)]
    for process in processes:
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 0 and said.splitlines()[-1:] == ["True"], said
    assert calls.read_text() == "call\n" * 2
    assert [made.suffix for made in fresh.iterdir()] == [".so"]


@needs_compiler
def test_a_program_that_compiles_under_several_names_is_called_by_its_own(
    fresh: Path, script: Callable[..., Path], tmp_path: Path
) -> None:
    """As ccache is, where /usr/lib/ccache/cc is a link to it."""
    wrapper = script(
        f'[ "${{0##*/}}" = cc ] || {{ echo "unknown option" >&2; exit 1; }}\n{copying(tmp_path / "calls")}',
        "cache",
    )
    (wrapper.parent / "cc").symlink_to(wrapper)
    assert compiler.library() is not None


@needs_compiler
def test_without_the_kernels_ends_where_it_ends() -> None:
    with pytest.raises(ValueError, match="inside"), compiler.turned_off():
        assert compiler.library() is None and not passes.fits(ONES)
        with compiler.turned_off():
            pass
        assert compiler.library() is None, "the inner one ended, the outer did not"
        raise ValueError("inside")
    assert compiler.library() is KERNELS and passes.fits(ONES)


ARGUMENTS = {"*": compiler._POINTER, "int64_t": compiler._INT, "float": compiler._FLOAT}


def declared() -> dict[str, tuple[object, ...]]:
    """The types of the arguments of all kernels, as the sources have them."""
    found: dict[str, tuple[object, ...]] = {}
    for source in compiler.SOURCES.glob("*.h"):
        for name, arguments in re.findall(r"^void NAME\((\w+)\)\(([^)]*)\)", source.read_text(), re.M):
            found[name] = tuple(
                ARGUMENTS["*" if "*" in argument else argument.split()[0]]
                for argument in arguments.split(",")
            )
    return found


def test_every_kernel_is_called_with_the_arguments_that_it_has() -> None:
    assert declared() == compiler.SIGNATURES


@needs_compiler
def test_every_kernel_is_there_in_both_types() -> None:
    assert tuple(passes.KERNEL_KINDS.values()) == compiler.KINDS
    for name in compiler.SIGNATURES:
        for dtype in passes.KERNEL_KINDS:
            assert passes.kernel(name, dtype).argtypes == compiler.SIGNATURES[name]


def test_the_command_line_knows_nothing_of_the_kernels() -> None:
    probe = (
        "import sys, swarmnode.cli.app;"
        " print([m for m in sys.modules if m.startswith('swarmnode.extensions.native')])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_installation_that_cannot_be_written_to_keeps_the_library_in_the_nodes_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    beside = tmp_path / "package" / "built"
    beside.parent.mkdir()
    monkeypatch.setattr(compiler, "SOURCES", beside.parent / "kernels")
    monkeypatch.setattr(compiler, "_cache", None)
    assert compiler._folder("digest.so") == beside
    monkeypatch.setattr(os, "access", lambda *_: False)
    compiler.keep_in(tmp_path / "cache")
    assert compiler._folder("digest.so") == tmp_path / "cache"
    beside.mkdir()
    (beside / "digest.so").touch()
    assert compiler._folder("digest.so") == beside, "somebody else has made it"


def test_a_user_without_a_home_does_without_kernels(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless(name: str) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compiler, "_folder", homeless)
    monkeypatch.setattr(compiler, "find_compiler", lambda: Path(sys.executable))
    assert compiler.library() is None
    assert "home directory" in caplog.text


@needs_compiler
def test_a_backward_pass_uses_the_kernels_that_its_forward_pass_did() -> None:
    with compiler.turned_off():
        assert not passes.fits(ONES)
        assert passes.kernel("rms_norm", ONES.dtype) is not None
