"""A checkpoint as a folder that others load: the adapter for PEFT, or the model with the adapter in it.

export_command.py -> [export_offline] -> offline.py -> Exported -> hub.py
"""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import StorageError
from swarmnode.machine.storage import whole_folder
from swarmnode.models import find_model
from swarmnode.node.commands.offline import load_checkpoint, of_round
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings
from swarmnode.training.records import State

if TYPE_CHECKING:
    from swarmnode.node.building.local_policy import LocalPolicy
    from swarmnode.training.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Exported:
    """An adapter or a merged model that was written to a folder."""

    what: str
    """Its kind and its round, in words."""
    merged: bool
    state: State
    """The state of its checkpoint."""
    run: str
    folder: Path


def export_offline(settings: Settings, folder: Path, *, merged: bool, best: bool = False) -> Exported:
    """Write the adapter of the newest or the best checkpoint, or the merged model, to `folder`."""
    from safetensors import SafetensorError

    if folder.exists():
        raise StorageError(f"{folder} exists already", hint="name a folder that does not exist yet")
    if merged:
        settings = replace(settings, config=for_merging(settings.config))
    write = _write_merged if merged else _write_adapter
    loading = load_checkpoint(settings, base=False, best=best, apply=False, purpose="export")
    with loading as (local, checkpoint):
        assert checkpoint is not None, "only the base model has none"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(folder, replaces=False) as aside:
                write(local, checkpoint, aside)
                # safetensors writes for the owner alone (0600), whatever the umask says. A file system
                # without modes, such as exFAT, may refuse to change any.
                for path in filter(Path.is_file, aside.rglob("*")):
                    with suppress(PermissionError):
                        path.chmod(aside.stat().st_mode & 0o666)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"cannot write {folder}: {error}", hint="check the disk and the path"
            ) from error
    what = "the merged model" if merged else "the adapter (PEFT)"
    run = checkpoint.folder.parent.name
    return Exported(f"{what} {of_round(checkpoint)}", merged, checkpoint.state, run, folder)


def for_merging(config: Config) -> Config:
    """Settings for merging: on a CPU the sum is formed in float32 unless the precision is set: in bfloat16 it
    would round away much of the adapter, and a node chooses that type for speed alone."""
    from swarmnode.model.base_model import find_device

    if config.policy.dtype != "auto" or find_device(config.policy.device).type != "cpu":
        return config
    return config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": "float32"})})


def _write_merged(local: "LocalPolicy", checkpoint: "Checkpoint", folder: Path) -> None:
    local.policy.load_adapter(checkpoint.adapter)
    local.policy.peft_model.merge_and_unload().save_pretrained(folder)
    local.base.tokenizer.save_pretrained(folder)


def _write_adapter(local: "LocalPolicy", checkpoint: "Checkpoint", folder: Path) -> None:
    """The adapter with its tokenizer, and a name of its base by which PEFT finds that from any folder."""
    shutil.copytree(checkpoint.adapter, folder, dirs_exist_ok=True)
    local.base.tokenizer.save_pretrained(folder)
    base = Path(find_model(local.base.name))
    path = folder / "adapter_config.json"
    said = json.loads(path.read_text())
    said["base_model_name_or_path"] = str(base.resolve()) if base.is_dir() else local.base.name
    path.write_text(json.dumps(said, indent=2, sort_keys=True))
