"""What the contract tests run against: hosts of both kinds, and vLLM engines, one per model and kind of
weights in the whole session, as each one costs seconds to start."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from swarmnode.errors import NetworkError
from swarmnode.extensions.vllm.compat import missing_reason
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from swarmnode.rollout.engine import Engine
from tests.contracts.hosts import HostFactory, memory_hosts, p2pd_hosts, private_hosts

LORA_RANK = 8
MAX_LENGTH = 128


@pytest.fixture(params=["memory", "p2pd", "private memory", "private p2pd"])
def new_host(request: pytest.FixtureRequest, tmp_path: Path) -> HostFactory:
    """Makes hosts that can reach each other."""
    if request.param.startswith("private "):
        return private_hosts(tmp_path, _hosts(request.param.removeprefix("private "), tmp_path))
    return _hosts(request.param, tmp_path)


@pytest.fixture(params=["memory", "p2pd"])
def new_below(request: pytest.FixtureRequest, tmp_path: Path) -> HostFactory:
    """Makes hosts that are in no private swarm."""
    return _hosts(request.param, tmp_path)


def _hosts(kind: str, folder: Path) -> HostFactory:
    if kind == "memory":
        return memory_hosts(folder)
    try:
        find_daemon()
    except NetworkError as error:
        pytest.skip(str(error))
    return p2pd_hosts(folder)


@pytest.fixture(scope="session")
def make_vllm_engine() -> Iterator[Callable[..., Engine]]:
    """`make(folder, base_model, slots=..., eos=..., weights="lora" | "merged")`, in float32, on the card
    where there is one.

    The same arguments give the same engine: leave it empty, and on whatever policy.
    """
    on_card = torch.cuda.is_available()
    if (reason := missing_reason("cuda" if on_card else "cpu")) is not None:
        pytest.skip(reason)
    from swarmnode.extensions.vllm.vllm_engine import VllmEngine

    engines: dict[tuple[Path, int, tuple[int, ...], str], VllmEngine] = {}

    def make(
        folder: Path, base_model: PreTrainedModel, *, slots: int, eos: Sequence[int], weights: str
    ) -> VllmEngine:
        assert weights in ("lora", "merged")
        if on_card and weights == "merged":
            pytest.skip("merged weights need vLLM in this process, and on a card it has its own")
        key = (folder, slots, tuple(eos), weights)
        if key not in engines:
            engines[key] = VllmEngine(
                str(folder), base_model, eos, slots, MAX_LENGTH,
                lora_rank=LORA_RANK, dtype="float32", weights=weights,
            )  # fmt: skip
        return engines[key]

    yield make
    for engine in engines.values():
        engine.close()
