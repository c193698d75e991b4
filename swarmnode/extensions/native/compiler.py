"""Compiles the kernels with the C compiler of this machine, once, and loads them.

kernels/ -> cc -> built/DIGEST.so -> [compiler] -> passes.py

What was compiled lies beside the sources, or in the cache where an installation cannot be written to, under a
name made of all it depends on: another compiler, CPU or source makes another file. A machine without a
compiler, or with one that fails, is told so once; nothing but speed is lost.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from swarmnode.machine.hardware import cpu_flags
from swarmnode.machine.storage import make_folder, resolve_paths

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC",
    # What vector instructions need; infinities and NaN keep their meaning.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
WIDE_VECTORS = "-mprefer-vector-width=512"
"""Compiler options for all of AVX-512: compilers use half of it by default, since the first CPUs with it were
slower with the whole."""
TIMEOUT_S = 120.0
"""Seconds for compiling; two to four are usual."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "rms_norm": (_POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _POINTER, _INT, _INT),
    "rms_norm_gradient": (*[_POINTER] * 6, _INT, _INT),
    "silu_mul": (_POINTER, _POINTER, _INT, _POINTER, _INT, _INT),
    "gelu_tanh_mul": (_POINTER, _POINTER, _INT, _POINTER, _INT, _INT),
    "silu_mul_gradient": (*[_POINTER] * 6, _INT),
    "rotate_heads": (_POINTER, _INT, _POINTER, _FLOAT, *[_POINTER] * 3, _INT, _INT, _INT),
    "rotate_heads_gradient": (
        _POINTER, _POINTER, _INT, _POINTER, _FLOAT, *[_POINTER] * 3, _INT, _INT, _INT,
    ),
    "packed_attention": (
        *[_POINTER, _INT] * 3, *[_POINTER] * 3, _INT, _FLOAT, *[_POINTER] * 3, *[_INT] * 5,
    ),
    "packed_attention_gradient": (
        _POINTER, *[_POINTER, _INT] * 3, *[_POINTER] * 5, _INT, _FLOAT, *[_POINTER] * 4, *[_INT] * 5,
    ),
    "attend": (_POINTER, _POINTER, _FLOAT, *[_POINTER] * 6, *[_INT] * 5, _FLOAT, _FLOAT, _INT),
    "split_heads": (_POINTER, _POINTER, _FLOAT, *[_POINTER] * 5, *[_INT] * 5),
    "sample": (
        _POINTER, _INT, *[_POINTER] * 4, _FLOAT, _INT, _POINTER, *[_INT] * 3, *[_POINTER] * 2, *[_INT] * 2,
    ),
}  # fmt: skip
KINDS = ("f32", "bf16")

_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None
_asked = False
_off = False
_cache: Path | None = None


def library() -> ctypes.CDLL | None:
    """Returns the kernels, each as NAME_f32 and NAME_bf16. None: they are turned off or unavailable. The
    first call of a process may compile them."""
    global _loaded, _asked
    if _off:
        return None
    if not _asked:
        with _lock:
            if not _asked:
                _loaded = _load()
                _asked = True
    return _loaded


def loaded() -> ctypes.CDLL | None:
    """Returns the result of the last `library`, even if kernels have been turned off since: a backward pass
    uses the same arithmetic as its forward pass."""
    return _loaded


def keep_in(cache: Path) -> None:
    """Sets the folder for compiled files if the installation cannot be written to."""
    global _cache
    _cache = cache


@contextmanager
def turned_off() -> Iterator[None]:
    """Context in which the kernels are turned off."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def find_compiler() -> Path | None:
    """Returns the C compiler that would be used."""
    found = next((path for name in COMPILERS if (path := shutil.which(name)) is not None), None)
    return None if found is None else Path(found)


def _load() -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        logger.info(
            "no C compiler (%s): torch's own operations are used, which is slower", ", ".join(COMPILERS)
        )
        return None
    try:
        return _opened(compiler, _folder(_file_name(compiler)))
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip()[-500:]
    except (OSError, AttributeError, RuntimeError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    logger.warning("%s cannot compile the CPU kernels, torch's own operations are used: %s", compiler, reason)
    return None


def _opened(compiler: Path, folder: Path) -> ctypes.CDLL:
    """Returns the library, compiled again if the file was damaged."""
    path = folder / _file_name(compiler)
    if path.exists():
        try:
            return open_library(path)
        except (OSError, AttributeError):
            path.unlink(missing_ok=True)
    return open_library(compiled(compiler, folder))


def compiled(compiler: Path, folder: Path) -> Path:
    """Returns the library's file in `folder`, compiled if it is missing. Raises OSError,
    CalledProcessError."""
    target = folder / _file_name(compiler)
    if target.exists():
        return target
    make_folder(folder)
    wide = [WIDE_VECTORS] if platform.machine() in ("x86_64", "AMD64") else []
    with TemporaryDirectory(dir=folder) as aside:
        made = Path(aside) / target.name
        subprocess.run(
            [str(compiler), *FLAGS, *wide, str(SOURCES / "kernels.c"), "-o", str(made), "-lm"],
            check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        with made.open("r+b") as whole:
            # A file that a power cut has shortened would end every process that loads it.
            os.fsync(whole.fileno())
        # Processes that compile at the same time make the same file.
        made.replace(target)
    logger.info("compiled the CPU kernels with %s (once)", compiler)
    return target


def open_library(path: Path) -> ctypes.CDLL:
    """Loads a library. Raises OSError if it is none, AttributeError if it lacks a kernel."""
    loaded = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        for kind in KINDS:
            kernel = getattr(loaded, f"{name}_{kind}")
            kernel.argtypes, kernel.restype = arguments, None
    return loaded


def _file_name(compiler: Path) -> str:
    """Returns a file name made of everything that the compiled library depends on."""
    stat = compiler.stat()
    parts = [str(compiler), str(stat.st_size), str(stat.st_mtime_ns), *FLAGS, WIDE_VECTORS]
    # Where a system does not tell what its CPU can do, another machine's library is not for this one.
    parts += [platform.machine(), *(sorted(cpu_flags()) or [platform.node()])]
    parts += [path.name + path.read_text("utf-8") for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24] + ".so"


def _folder(name: str) -> Path:
    """Returns the folder of the file: beside the sources if it is there or can be written, else the cache.
    Raises RuntimeError if the user has no home."""
    beside = SOURCES.parent / "built"
    writable = os.access(beside if beside.exists() else beside.parent, os.W_OK)
    if writable or (beside / name).exists():
        return beside
    return resolve_paths().cache / "native" if _cache is None else _cache
