"""The choice of our Triton kernel and of its launch configuration, measured on this machine once per
shape."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from swarmnode.machine.storage import replace_file

logger = logging.getLogger(__name__)

MIN_GAIN = 1.03
"""Least speed-up of the kernel over `addmm_`: a smaller gain is noise."""

BUDGET_S = 60.0
"""Seconds that one process gives to measuring, most of it compiling. The rest waits for the next start."""

MAX_RELATIVE_ERROR = {"float32": 5e-3, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest difference to `addmm_`, over the largest value. Rounding stays far below, a lost element does not.
For float32 it leaves room for a cuBLAS that was allowed to use TF32."""

MAX_FILE_BYTES = 2**20

Run = Callable[[], Tensor]


class GemmShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of a LoRA GEMM that determine its time; calls of one shape share an answer."""

    n: int
    k: int
    swapped: bool
    """True if neighbours along n, not k, lie side by side in the weight: so in dX."""
    rank: int
    """Rank, rounded up to the kernel's block."""
    tokens: int
    """Number of tokens, rounded to a power of two."""
    dtype: str
    several: bool
    """True if the batch has more than one adapter."""

    @classmethod
    def of(cls, x_MK: Tensor, weight_NK: Tensor, rank: int, several: bool) -> "GemmShape":
        n, k = weight_NK.shape
        return cls(
            n=n,
            k=k,
            swapped=weight_NK.stride(0) < weight_NK.stride(1),
            rank=max(16, 1 << (rank - 1).bit_length()),
            tokens=_nearest_power_of_two(len(x_MK)),
            dtype=str(x_MK.dtype).removeprefix("torch."),
            several=several,
        )

    def __str__(self) -> str:
        adapters = "several adapters" if self.several else "one adapter"
        side = "dX " if self.swapped else ""
        return f"{side}{self.k} -> {self.n}, {self.tokens} tokens, r {self.rank}, {self.dtype}, {adapters}"


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of one measurement. Median milliseconds."""

    shape: GemmShape
    addmm_ms: float
    kernel_ms: float | None = None
    """Milliseconds of the kernel. None: no configuration could be launched with the right result."""
    config: str | None = None
    """Name of the fastest configuration."""

    @property
    def pays(self) -> bool:
        return self.kernel_ms is not None and self.kernel_ms * MIN_GAIN <= self.addmm_ms


class KernelEnvironment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The environment that a measurement is valid for."""

    device: str
    driver: str
    cuda: str
    torch: str
    triton: str
    kernel: str
    """Digest of our kernel's source."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: KernelEnvironment
    verdicts: list[Verdict]


class Timer(Protocol):
    """Milliseconds of each of several ways to do the same, measured side by side."""

    def __call__(self, runs: Mapping[str, Run]) -> dict[str, float]: ...


class KernelChoice:
    """Measured answers for the shapes of one machine, kept in `cache_file`.

    >>> choice = KernelChoice(Path("lora_kernel.json"), machine, timer)     # doctest: +SKIP
    >>> choice.verdict(shape, addmm, {"128x128x32 warps 4 stages 4": run}).pays  # doctest: +SKIP
    """

    def __init__(
        self,
        cache_file: Path,
        machine: KernelEnvironment,
        timer: Timer,
        budget_s: float = BUDGET_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = cache_file
        self._machine = machine
        self._timer = timer
        self._left_s = budget_s
        self._clock_s = clock_s
        self._measured = _read(cache_file, machine)
        self._given_up: set[GemmShape] = set()
        self._unfinished: set[GemmShape] = set()

    def known(self, shape: GemmShape) -> Verdict | None:
        return self._measured.get(shape)

    def open(self, shape: GemmShape) -> bool:
        """Returns True if this shape has neither been measured nor given up in this process."""
        return shape not in self._measured and shape not in self._given_up

    def measure(self, shape: GemmShape, contest: Callable[[], tuple[Run, Mapping[str, Run]]]) -> None:
        """Times `addmm_` against each configuration, which `contest` makes with their inputs, and keeps the
        answer.

        Short memory or a spent budget gives the shape up until the next start.
        """
        if self._left_s <= 0:
            self._give_up(shape, "the time for measuring is spent")
            return
        started_s = self._clock_s()
        try:
            verdict = self._contest(shape, contest, started_s)
        except torch.OutOfMemoryError:
            self._give_up(shape, "there is no memory to measure in")
            return
        finally:
            self._left_s -= self._clock_s() - started_s
        self._measured[shape] = verdict
        _say(verdict)
        self._save()

    def _contest(
        self, shape: GemmShape, contest: Callable[[], tuple[Run, Mapping[str, Run]]], started_s: float
    ) -> Verdict:
        addmm, configs = contest()
        expected = addmm()
        right: dict[str, Run] = {}
        for name, run in configs.items():
            if right and self._clock_s() - started_s > self._left_s:
                logger.info("LoRA %s: no time left to try %s and what follows", shape, name)
                self._unfinished.add(shape)
                break
            if _is_right(shape, name, run, expected):
                right[name] = run
        del expected
        times_ms = self._timer({"addmm_": addmm, **right})
        addmm_ms = times_ms.pop("addmm_")
        if not times_ms:
            return Verdict(shape, addmm_ms)
        best = min(times_ms, key=times_ms.__getitem__)
        return Verdict(shape, addmm_ms, times_ms[best], best)

    def _give_up(self, shape: GemmShape, reason: str) -> None:
        self._given_up.add(shape)
        logger.info("LoRA %s: addmm_ until the next start, because %s", shape, reason)

    def _save(self) -> None:
        content = _File(self._machine, [v for s, v in self._measured.items() if s not in self._unfinished])
        try:
            replace_file(self._file, msgspec.json.format(msgspec.json.encode(content), indent=1))
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): kernels are measured again next time", self._file, error
            )


@dataclass(frozen=True, slots=True)
class CudaTimer:
    """Medians by CUDA events. Contenders take turns, so that a clock that drops slows all of them.

    A turn is a burst of calls: a layer so small that launching costs more than computing shows that, as in
    training.
    """

    device: torch.device
    turns: int = 9
    burst_ms: float = 2.0
    max_burst: int = 20

    def __call__(self, runs: Mapping[str, Run]) -> dict[str, float]:
        with torch.cuda.device(self.device):
            once_ms = min(self._burst_ms(run, 1) for run in runs.values())
            calls = max(1, min(self.max_burst, int(self.burst_ms / max(once_ms, 1e-3))))
            found: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(self.turns):
                for name, run in runs.items():
                    found[name].append(self._burst_ms(run, calls))
        return {name: median(times) for name, times in found.items()}

    def _burst_ms(self, run: Run, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls


def _is_right(shape: GemmShape, name: str, run: Run, expected: Tensor) -> bool:
    """Launches one configuration and compares its result. Logs one that does not fit into the GPU or is
    wrong."""
    try:
        y_MN = run()
        scale, error = float(expected.abs().max()), float((y_MN - expected).abs().max())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        logger.info("LoRA %s: skipping %s", shape, error)
        return False
    # Written so that NaN is wrong.
    if not error <= MAX_RELATIVE_ERROR[shape.dtype] * scale:
        logger.warning("LoRA %s: %s is off by %.3g of %.3g and is never used", shape, name, error, scale)
        return False
    return True


def _say(verdict: Verdict) -> None:
    if verdict.kernel_ms is None:
        logger.info("LoRA %s: addmm_ (%.3f ms), no kernel runs right here", verdict.shape, verdict.addmm_ms)
        return
    logger.info(
        "LoRA %s: %s, kernel %.3f ms (%s), addmm_ %.3f ms: %.2fx",
        verdict.shape,
        "kernel" if verdict.pays else "addmm_",
        verdict.kernel_ms,
        verdict.config,
        verdict.addmm_ms,
        verdict.addmm_ms / verdict.kernel_ms,
    )


def _nearest_power_of_two(count: int) -> int:
    below = 1 << (count.bit_length() - 1)
    return below if count - below < 2 * below - count else 2 * below


def _read(path: Path, machine: KernelEnvironment) -> dict[GemmShape, Verdict]:
    """Returns verdicts of an earlier start on the same machine. Other content of the file is ignored."""
    if not path.exists():
        return {}
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        logger.warning("%s is damaged (%s): kernels are measured again", path, error)
        return {}
    if found.machine != machine:
        logger.info(
            "%s was measured with another GPU, driver, torch, Triton or kernel: measuring again", path
        )
        return {}
    return {verdict.shape: verdict for verdict in found.verdicts}
