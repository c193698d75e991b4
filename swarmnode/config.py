"""Every setting: frozen sections, one sentence under each field, and the layers a value may come from.

defaults < preset (configs/NAME.toml) < user file < --config < SWARMNODE_SECTION__KEY < --set

`load_config` merges the layers, refuses unknown keys (naming the closest one) and remembers where each value
came from, so that `swarmnode config show` can say so.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from swarmnode.errors import ConfigError

ENV_PREFIX = "SWARMNODE_"
NOT_SETTINGS = frozenset({"SWARMNODE_HOME"})
"""Variables with our prefix that are no settings."""


class Section(BaseModel):
    """A frozen group of settings. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _one_value_is_a_list_of_one(cls, value: Any, info: ValidationInfo) -> Any:
        """`--set tasks.names=rev` means what it looks like."""
        field = cls.model_fields[str(info.field_name)]
        return (value,) if isinstance(value, str) and get_origin(field.annotation) is tuple else value


class SwarmConfig(Section):
    name: str = Field(default="commons", pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Nodes with the same swarm name exchange rollouts; others never hear each other."""


class NetworkConfig(Section):
    listen: str = "0.0.0.0"
    """IPv4 address to listen on. 127.0.0.1 keeps the node to this machine."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port. 0: the port this node used last time, or any free one. A port named here must be free."""
    announce: tuple[str, ...] = ()
    """Public multiaddrs to tell peers instead of the ones we listen on (behind a forwarded port)."""
    seeds: tuple[str, ...] = ()
    """Addresses of peers to dial first, each a multiaddr that ends in /p2p/<peer id>."""
    mdns: bool = False
    """Find peers in the local network by multicast DNS."""
    wait_for_peers: int = Field(default=0, ge=0)
    """Connected peers to wait for before round 1. 0 starts alone at once."""
    wait_for_peers_s: float = Field(default=60.0, ge=0)
    """Longest such wait in seconds; then the node starts with the peers it has."""

    @field_validator("listen")
    @classmethod
    def _listen_is_ipv4(cls, text: str) -> str:
        return str(IPv4Address(text))


class PolicyConfig(Section):
    model: str = "auto"
    """auto, tiny, a folder, or a hub name of a causal LM. auto: tiny without a GPU, else by free memory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the base weights. auto: bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = Field(default=1, ge=1)
    """torch threads on a CPU. More than one pays only for large models on an idle machine."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank of the LoRA adapter, on all linear layers."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA scaling is alpha / rank."""


class TasksConfig(Section):
    names: tuple[str, ...] = ("builtin",)
    """Built-in task names, `builtin` for all eight, or paths of task files."""
    eval_examples: int = Field(default=64, ge=1, le=1024)
    """Held-out examples per task in an evaluation."""


class RolloutConfig(Section):
    groups: int = Field(default=8, ge=1, le=1024)
    """Groups generated per round. All are shared; how many train depends on what peers sent."""
    group_size: int = Field(default=8, ge=2, le=64)
    """Completions per example (G)."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest completion in tokens."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens. Examples with longer ones are left out, with a line in the log."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature. Training needs exploration, so it cannot be 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. 1 samples from the whole distribution."""
    slots: int = Field(default=256, ge=1, le=4096)
    """Most sequences generated at the same time."""
    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """What generates. auto: vLLM on a GPU where it is installed, else our own loop; `join` says why."""
    mode: Literal["refill", "april", "sync"] = "refill"
    """How a round ends. refill: as soon as its groups are complete, the rest goes on into the next round.
    april: as the paper has it (ask for more, stop, resume). sync: waits for everything."""
    concurrency: int | None = Field(default=None, ge=1)
    """Sequences kept in flight in mode refill. Unset: from the measured cost of a step."""
    over_provision: float = Field(default=2.0, ge=1, le=16)
    """Groups asked for per group wanted, in mode april."""
    max_lag: int = Field(default=8, ge=0)
    """Oldest policy version that a trained token of our own may have, counted back from the newest. 0: none
    but the newest."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Generate the next round while this one is trained on. auto: where memory and processors allow it."""


class ExchangeConfig(Section):
    enabled: bool = True
    """Share rollouts and train on others'. Off: plain local GRPO, no network at all."""
    local_groups: int = Field(default=4, ge=0)
    """I: own groups to train on per round (SAPO section 3; 4/4 won the paper's comparison)."""
    external_groups: int = Field(default=4, ge=0)
    """J: other nodes' groups to train on per round. What is missing is filled up with own groups."""
    max_age: int = Field(default=8, ge=0)
    """Oldest external group still trained on, in our policy versions since it arrived."""
    buffer_groups: int = Field(default=256, ge=1, le=65536)
    """Accepted external groups kept for later rounds."""
    shards: int = Field(default=1, ge=1, le=64)
    """Gossip topics the swarm's headers are spread over. All nodes of a swarm must agree."""


class TrainingConfig(Section):
    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW learning rate of the adapter."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip of the probability ratio (1 - clip_low)."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper clip of the probability ratio (1 + clip_high); wider than below, as DAPO has it."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm of one optimizer step."""
    sequences_per_step: int = Field(default=128, ge=1)
    """Completions per optimizer step."""
    correction: Literal["none", "tis", "icepop", "decoupled"] = "tis"
    """How tokens sampled by another policy than the newest are weighted: truncated importance sampling,
    masked importance sampling, decoupled PPO, or not at all."""
    correction_cap: float = Field(default=2.0, ge=1)
    """Largest weight of a token with tis."""
    correction_low: float = Field(default=0.5, ge=0, le=1)
    """icepop leaves out tokens with a smaller weight."""
    correction_high: float = Field(default=5.0, ge=1)
    """icepop and decoupled leave out tokens with a larger weight."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Tokens, padding included, in one forward pass. Halved by itself when memory runs out."""


class NodeConfig(Section):
    seed: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Seed of draws, sampling and adapter. Unset: from the peer id, so that nodes ask different questions."""
    rounds: int | None = Field(default=None, ge=0)
    """Stop when this many rounds are done, counted over all starts. Unset: go on until stopped."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Rounds between checkpoints. One more is written at every orderly stop."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Checkpoints kept; older ones are deleted."""
    eval_every: int = Field(default=0, ge=0)
    """Rounds between evaluations on held-out draws. 0: only at the first start and at the end."""
    http: str = "127.0.0.1"
    """Address of the status page (/healthz, /status, /metrics)."""
    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of the status page. 0: any free one; `swarmnode status` finds it."""


class Config(Section):
    swarm: SwarmConfig = SwarmConfig()
    network: NetworkConfig = NetworkConfig()
    policy: PolicyConfig = PolicyConfig()
    tasks: TasksConfig = TasksConfig()
    rollout: RolloutConfig = RolloutConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    training: TrainingConfig = TrainingConfig()
    node: NodeConfig = NodeConfig()

    @model_validator(mode="after")
    def _enough_groups_to_train_on(self) -> "Config":
        wanted = self.exchange.local_groups + self.exchange.external_groups
        if self.exchange.enabled and wanted == 0:
            raise ValueError(
                "exchange.local_groups and exchange.external_groups are both 0: nothing to train on"
            )
        return self


SECTIONS: dict[str, type[Section]] = {
    "swarm": SwarmConfig,
    "network": NetworkConfig,
    "policy": PolicyConfig,
    "tasks": TasksConfig,
    "rollout": RolloutConfig,
    "exchange": ExchangeConfig,
    "training": TrainingConfig,
    "node": NodeConfig,
}
KEYS = tuple(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields)


def explain_setting(key: str) -> str:
    """The sentence under a setting.

    >>> explain_setting("network.mdns")
    'Find peers in the local network by multicast DNS.'
    """
    section, _, name = key.partition(".")
    return " ".join((SECTIONS[section].model_fields[name].description or "").split())


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of one origin, flat: `section.key` -> value."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The merged settings and the origin of each (`section.key` -> where it was set)."""

    config: Config
    origins: Mapping[str, str]


def load_config(
    *,
    preset: Path | None = None,
    user_file: Path | None = None,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Merge all layers. `flags` are command-line flags that stand for a key (`--seed`); they win last.

    Raises ConfigError naming the layer, the key and, for an unknown key, the closest known one.
    """
    layers: list[Layer] = []
    if preset is not None:
        layers.append(_file_layer(f"preset {preset.stem}", preset))
    if user_file is not None and user_file.exists():
        layers.append(_file_layer(str(user_file), user_file))
    if config_file is not None:
        layers.append(_file_layer(f"--config {config_file}", config_file))
    layers.extend(_environment_layers(os.environ if environ is None else environ))
    layers.append(Layer("--set", dict(_split_assignment(text) for text in assignments)))
    layers.append(Layer("command line", flags or {}))
    return merge_layers(layers)


def merge_layers(layers: Iterable[Layer]) -> LoadedConfig:
    """Later layers win. Every key of every layer must exist, also one that is overridden."""
    origins = dict.fromkeys(KEYS, "default")
    tree: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for key, value in layer.values.items():
            _require_known(key, layer.origin)
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = value
            origins[key] = layer.origin
    try:
        return LoadedConfig(Config.model_validate(tree), origins)
    except ValidationError as error:
        raise _explain(error, origins) from None


def presets(folder: Path) -> dict[str, Path]:
    """Preset name -> file, for every TOML file of the folder that is one."""
    return {path.stem: path for path in sorted(folder.glob("*.toml")) if path.stem != "models"}


def _file_layer(origin: str, path: Path) -> Layer:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", hint="correct that line") from None
    values: dict[str, Any] = {}
    for section, content in tree.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{origin}: {section!r} stands outside a section", hint=_closest(section))
        values.update({f"{section}.{key}": value for key, value in content.items()})  # type: ignore[misc]
    return Layer(origin, values)


def _environment_layers(environ: Mapping[str, str]) -> list[Layer]:
    layers: list[Layer] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in NOT_SETTINGS:
            continue
        section, separator, key = variable.removeprefix(ENV_PREFIX).lower().partition("__")
        if not separator:
            raise ConfigError(f"{variable} is no setting", hint=f"write {ENV_PREFIX}SECTION__KEY")
        layers.append(Layer(variable, {f"{section}.{key}": _parse_value(text)}))
    return layers


def _split_assignment(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text!r} has no '='", hint="write --set section.key=value")
    return key.strip(), _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    """A TOML value where it is one (3, true, ["a"]), else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _require_known(key: str, origin: str) -> None:
    if key not in KEYS:
        raise ConfigError(f"unknown setting {key!r} ({origin})", hint=_closest(key))


def _closest(key: str) -> str:
    """Advice naming the nearest known key, by whole name first and by last part second."""
    matches = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.6)
    if not matches:
        tails = {full.partition(".")[2]: full for full in KEYS}
        matches = [
            tails[t] for t in difflib.get_close_matches(key.rpartition(".")[2], tails, n=1, cutoff=0.6)
        ]
    return f"Did you mean {matches[0]!r}?" if matches else "`swarmnode config show` lists every setting"


def _explain(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    where = f" ({origins[key]})" if key in origins else ""
    message = first["msg"].removeprefix("Value error, ")
    shown = f"{key} = {first['input']!r}: " if key in origins else ""
    return ConfigError(f"{shown}{message}{where}", hint="`swarmnode config show` explains every setting")
