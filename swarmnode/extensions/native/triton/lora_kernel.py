"""The Triton kernel in the form that `lora.py` calls, or the reason why this machine has none."""

import hashlib
import importlib.util
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarmnode.extensions.native.triton.kernel_choice import (
    BUDGET_S,
    CudaTimer,
    GemmShape,
    KernelChoice,
    KernelEnvironment,
    Run,
)
from swarmnode.machine.hardware import NVIDIA_SMI_TIMEOUT_S
from swarmnode.model.adapters.lora import GemmInputs, KernelOffer, Segment

if TYPE_CHECKING:
    from swarmnode.extensions.native.triton.kernels import LaunchConfig, TileTable

SEVERAL = 3
"""Number of adapters in a measurement that represents any batch with more than one."""

MAX_TABLES = 32
"""Tile tables kept at once: a few tile heights for each of the last micro-batches."""


class LoraKernel:
    """The kernel behind the `LoraGemm` protocol: whether a shape pays is measured. `policies`: adapters that
    train together; with several, shapes are measured with several."""

    def __init__(self, choice: KernelChoice, policies: int = 1) -> None:
        from swarmnode.extensions.native.triton import kernels

        self._kernels = kernels
        self._configs = {config.name: config for config in kernels.CONFIGS}
        self._choice = choice
        self._several = policies > 1
        self._tables: dict[tuple[tuple[Segment, ...], int, int, torch.device], TileTable] = {}

    def pays(self, x_MK: Tensor, weight_NK: Tensor, rank: int) -> bool:
        """Returns True if the kernel beats `addmm_` here. The first call for a shape measures it (some
        seconds)."""
        if len(x_MK) == 0 or x_MK.dtype not in self._kernels.DTYPES or weight_NK.dtype != x_MK.dtype:
            return False
        shape = GemmShape.of(x_MK, weight_NK, rank, self._several)
        if self._choice.open(shape):
            with torch.no_grad():
                self._choice.measure(shape, lambda: self._contest(shape, weight_NK))
        verdict = self._choice.known(shape)
        return verdict is not None and verdict.pays and verdict.config in self._configs

    def __call__(self, given: GemmInputs) -> Tensor:
        """Returns y [M, N]. Raises the errors of `kernels.lora_gemm`."""
        verdict = self._choice.known(
            GemmShape.of(given.x_MK, given.weight_NK, given.s_MR.shape[-1], self._several)
        )
        name = None if verdict is None else verdict.config
        config = self._configs[name] if name in self._configs else self._kernels.CONFIGS[0]
        return self._launch(given, config)

    def _launch(self, given: GemmInputs, config: "LaunchConfig") -> Tensor:
        x_MK, weight_NK, s_MR, b_ANR, scaling_A, segments, bias_N = given
        tiles = self._tiles(segments, len(x_MK), config.block_m, x_MK.device)
        return self._kernels.lora_gemm(x_MK, weight_NK, s_MR, b_ANR, scaling_A, tiles, config, bias_N)

    def _tiles(
        self, segments: tuple[Segment, ...], rows: int, block_m: int, device: torch.device
    ) -> "TileTable":
        key = (segments, rows, block_m, device)
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) == MAX_TABLES:
                self._tables.pop(next(iter(self._tables)))
            found = self._tables[key] = self._kernels.TileTable.build(*key)
        return found

    def _contest(self, shape: GemmShape, weight_NK: Tensor) -> tuple[Run, dict[str, Run]]:
        """Returns both contenders on the layer's own weight and random inputs, which share no generator with
        training."""
        device, dtype = weight_NK.device, weight_NK.dtype
        generator = torch.Generator(device).manual_seed(0)
        adapters = SEVERAL if shape.several else 1

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        x_MK, s_MR = normal(shape.tokens, shape.k), normal(shape.tokens, shape.rank)
        # As large as the base's part, so that an error in either shows.
        norm = torch.linalg.vector_norm(weight_NK, dtype=torch.float32)
        b_ANR = normal(adapters, shape.n, shape.rank).mul_(norm / (shape.n * shape.rank) ** 0.5)
        if shape.swapped:
            # In dX, B is A^T: a stack [A, R, N] seen from the other side.
            b_ANR = b_ANR.transpose(1, 2).contiguous().transpose(1, 2)
        scalings = [1.0 + adapter / 2 for adapter in range(adapters)]
        scaling_A = torch.tensor(scalings, device=device)
        segments = _uneven(shape.tokens, adapters)
        given = GemmInputs(x_MK, weight_NK, s_MR, b_ANR, scaling_A, segments)

        def addmm() -> Tensor:
            y_MN = x_MK @ weight_NK.t()
            for segment in segments:
                rows, adapter = slice(segment.start, segment.end), segment.adapter
                y_MN[rows].addmm_(s_MR[rows], b_ANR[adapter].t(), alpha=scalings[adapter])
            return y_MN

        def with_config(config: "LaunchConfig") -> Run:
            return lambda: self._launch(given, config)

        return addmm, {name: with_config(config) for name, config in self._configs.items()}


def available(device: torch.device) -> tuple[bool, str]:
    """Returns True if the kernel can be tried on `device`, and a sentence that says so. Compiles nothing.

    >>> available(torch.device("cpu"))
    (False, 'the LoRA kernel needs a CUDA GPU, this node trains on cpu: addmm_ is used')
    """
    if device.type != "cuda":
        return False, f"the LoRA kernel needs a CUDA GPU, this node trains on {device.type}: addmm_ is used"
    if importlib.util.find_spec("triton") is None:
        return (
            False,
            "the LoRA kernel needs Triton, which is not installed: addmm_ is used",
        )
    return True, "the LoRA kernel is used for shapes where a measurement finds it 3 % faster than addmm_"


def lora_gemm_for(
    device: torch.device, cache_file: Path, policies: int = 1, budget_s: float = BUDGET_S
) -> KernelOffer:
    """Returns the kernel for `device`, once a tiny launch has given the right numbers, or else the reason.
    Earlier measurements are read from `cache_file`, new ones are added to it."""
    possible, reason = available(device)
    if not possible:
        return KernelOffer(None, reason)
    choice = KernelChoice(cache_file, _this_machine(device), CudaTimer(device), budget_s)
    kernel = LoraKernel(choice, policies)
    try:
        _probe(kernel, device)
    except RuntimeError as error:
        advice = "Triton needs a C compiler (gcc) and Python's headers"
        return KernelOffer(None, f"the LoRA kernel cannot be used ({error}; {advice}): addmm_ is used")
    return KernelOffer(kernel, reason)


def _probe(kernel: LoraKernel, device: torch.device) -> None:
    """Compiles and launches once. Raises RuntimeError if either fails or the result is wrong."""
    ones = torch.ones(17, 40, device=device, dtype=torch.float16)
    s_MR, b_ANR = ones[:, :3].contiguous(), ones[None, :, :3].contiguous()
    scaling_A = torch.full((1,), 2.0, device=device)
    segments = (Segment(0, 16, 0), Segment(16, 17, -1))
    y_MN = kernel(GemmInputs(ones, ones, s_MR, b_ANR, scaling_A, segments))
    if y_MN[:16].ne(46.0).any() or y_MN[16].ne(40.0).any():
        raise RuntimeError("its result for ones is wrong")


def _uneven(tokens: int, adapters: int) -> tuple[Segment, ...]:
    """Returns segments that end inside tiles."""
    inner = [tokens * a // adapters - 1 for a in range(1, adapters)]
    ends = [*inner, tokens]
    return tuple(Segment(s, e, a) for a, (s, e) in enumerate(zip([0, *ends], ends, strict=False)))


def _this_machine(device: torch.device) -> KernelEnvironment:
    from swarmnode.extensions.native.triton import kernels

    return KernelEnvironment(
        device=torch.cuda.get_device_name(device),
        driver=_driver(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")),
        cuda=torch.version.cuda or torch.version.hip or "unknown",
        torch=str(torch.__version__),
        triton=version("triton"),
        kernel=hashlib.sha256(Path(kernels.__file__).read_bytes()).hexdigest()[:16],
    )


def _driver(command: Sequence[str]) -> str:
    """Returns the driver's version, which torch does not tell."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.split() or ["unknown"])[0] if done.returncode == 0 else "unknown"
