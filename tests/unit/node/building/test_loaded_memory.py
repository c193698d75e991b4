"""Free memory of a device, once a model is loaded."""

import pytest
import torch

from swarmnode.machine.hardware import inspect_machine
from swarmnode.node.building.loaded_memory import free_bytes
from swarmnode.settings.config_layers import load_config

GIB = 2**30


@pytest.mark.parametrize(("limit", "free"), [("", 77), ("limits.memory_gb=40", 37)])
def test_what_torch_keeps_of_a_card_to_use_again_is_free(
    limit: str, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest micro-batch was tried: 27 GiB of it are reserved, and nothing of them is in use."""
    card = {"mem_get_info": (50 * GIB, 80 * GIB), "memory_reserved": 30 * GIB, "memory_allocated": 3 * GIB}
    for name, answer in card.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    config = load_config(environ={}, assignments=[limit] if limit else []).config
    assert free_bytes(config, torch.device("cuda"), inspect_machine()) == free * GIB
