"""`swarmnode pull`: go on here with a run that was pushed elsewhere.

hub.py: fetched -> [pull] -> a checkpoint in data/checkpoints/RUN -> `swarmnode join --run RUN`
"""

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Home, Policy, RunName
from swarmnode.errors import CheckpointError
from swarmnode.extensions.results.hub import fetched
from swarmnode.extensions.results.model_card import base_name
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.printable import printable
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.training.checkpoints.run_folders import label_of
from swarmnode.training.records import State

LayerName = Annotated[str, msgspec.Meta(max_length=200)]


class AdapterShape(msgspec.Struct, frozen=True):
    """The part of adapter_config.json that a LoRA adapter is made by; all else in it is left out."""

    r: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    lora_alpha: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    target_modules: Annotated[list[LayerName], msgspec.Meta(max_length=4096)]


def pull(
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository given to `export --push`.")],
    run: RunName = None,
    policy: Policy = 0,
    home: Home = None,
    json: Json = False,
) -> None:
    """Fetch a pushed run into this home, and say how to continue it.

    It brings the adapter, round and rewards; the optimizer starts fresh, and no answers are included.
    """
    name = run or label_of([repo.rpartition("/")[2]])
    load_config(environ={}, flags={"node.run": name})
    paths = resolve_paths(home).policy(policy)
    if (paths.checkpoints / name).exists():
        raise CheckpointError(f"this home already has a run {name}", hint="choose another name: --run NAME")
    with TemporaryDirectory() as folder:
        state = fetched(repo, Path(folder))
        shape = _put(Path(folder), state, paths, name)
    command = _command(name, state, shape, home)
    told = f"pulled run {name}, after round {state.counters.round}; continue with:\n  {printable(command)}"
    tell(json, {"run": name, "round": state.counters.round, "command": command}, [told])


def _put(folder: Path, state: State, paths: Paths, name: str) -> AdapterShape:
    """Makes a checkpoint of what was fetched."""
    import torch
    from peft import LoraConfig
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from swarmnode.training.checkpoints.checkpoint import DTYPES, RNG, Snapshot, Waiting
    from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore

    try:
        shape = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=AdapterShape)
        tensors = load_file(str(folder / "adapter_model.safetensors"))
    except (msgspec.DecodeError, SafetensorError, OSError) as error:
        raise CheckpointError(f"the adapter cannot be read: {error}", hint="push it again") from error
    if odd := [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES]:
        raise CheckpointError(
            f"the adapter has numbers of an unsupported type: {odd[0]}", hint="push it again"
        )
    lora = LoraConfig(
        r=shape.r,
        lora_alpha=shape.lora_alpha,
        target_modules=shape.target_modules,
        task_type="CAUSAL_LM",
    )
    snapshot = Snapshot(state, lora, tensors, {RNG: torch.get_rng_state()}, Waiting())
    CheckpointStore(paths.checkpoints / name).write(snapshot)
    return shape


def _command(name: str, state: State, shape: AdapterShape, home: Path | None) -> str:
    """Returns the command that goes on: its words are quoted, as a stranger chose some of them."""
    words = ["swarmnode", "join", "--run", name, "--model", base_name(state.base_model)]
    for task in sorted(state.tasks) or state.measure.tasks:
        words += ["--task", task]
    default = Config().policy
    for key, value, usual in (
        ("lora_rank", shape.r, default.lora_rank),
        ("lora_alpha", shape.lora_alpha, default.lora_alpha),
    ):
        words += [] if value == usual else ["--set", f"policy.{key}={value}"]
    words += [] if home is None else ["--home", str(home)]
    return shlex.join(words)
