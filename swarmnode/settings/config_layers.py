"""The layers that a setting may come from; later ones take precedence.

defaults < preset < user file < --config < SWARMNODE_SECTION__KEY < --set < flags -> [config_layers] -> Config

`load_config` merges the layers, rejects unknown keys (naming the closest one) and records where each value
came from, so that `swarmnode config show` can say so.
"""

import difflib
import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import SecretStr, ValidationError

from swarmnode.errors import ConfigError
from swarmnode.machine.storage import Paths, builtin_folder, resolve_paths
from swarmnode.models import resolve_model
from swarmnode.settings.config import KEYS, SECRET, SECTIONS, Config, JudgeConfig, Section
from swarmnode.settings.other_names import other_names

ENV_PREFIX = "SWARMNODE_"
NOT_SETTINGS = frozenset(
    {"SWARMNODE_HOME", "SWARMNODE_SERVE_KEY", "SWARMNODE_WATCH_PASSWORD", "SWARMNODE_VLLM_STARTED_BY"}
)
"""Environment variables with our prefix that are not settings."""


_NAMES = (*KEYS, *(f"tasks.judge.{name}" for name in JudgeConfig.model_fields))
"""Names that may be suggested for an unknown one."""


@dataclass(frozen=True, slots=True)
class ConfigLayer:
    """Values from one origin, flat: `section.key` -> value."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The merged settings and the origin of each (`section.key` -> where it was set)."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Settings(LoadedConfig):
    """The merged settings of a command or a script. `model` is resolved: tiny, a folder or a hub name."""

    paths: Paths
    model: str
    model_reason: str


def load_config(
    *,
    preset: Path | None = None,
    user_file: Path | None = None,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    flags_from: str = "command line",
) -> LoadedConfig:
    """Merges all layers. `flags`: command-line flags that stand for a key (`--seed`), or a script's settings,
    in which a section may be a nested dictionary; they take precedence over all others.

    Raises ConfigError, which names the layer, the key and, for an unknown key, the closest known one.
    """
    layers: list[ConfigLayer] = []
    if preset is not None:
        layers.append(_file_layer(f"preset {preset.stem}", preset))
    if user_file is not None and user_file.exists():
        layers.append(_file_layer(str(user_file), user_file))
    if config_file is not None:
        layers.append(_file_layer(f"--config {config_file}", config_file))
    layers.extend(_environment_layers(os.environ if environ is None else environ))
    layers.append(ConfigLayer("--set", dict(_split_assignment(text) for text in assignments)))
    layers.append(ConfigLayer(flags_from, dict(flat(flags or {}))))
    return merge_layers(layers)


def merge_layers(layers: Iterable[ConfigLayer]) -> LoadedConfig:
    """Merges layers; later ones take precedence, within a table entry by entry. Every key of every layer must
    exist, even an overridden one."""
    origins = dict.fromkeys(KEYS, "default")
    tree: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for key, value in layer.values.items():
            section, name, *entry = key.split(".", 2) if "." in key else ("", key)
            setting = f"{section}.{name}"
            if setting not in KEYS:
                raise _unknown(key, layer.origin)
            value = {entry[0]: value} if entry else value
            before = tree.setdefault(section, {}).get(name)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                value = {**cast(Mapping[str, Any], before), **cast(Mapping[str, Any], value)}
            tree[section][name] = value
            origins[setting] = layer.origin
    try:
        return LoadedConfig(Config.model_validate(tree), origins)
    except ValidationError as error:
        raise _explain(error, origins) from None


def load_settings(
    *,
    home: Path | None = None,
    preset: str | None = None,
    config_file: Path | None = None,
    assignments: Sequence[str] | None = None,
    flags: Mapping[str, Any] | None = None,
    flags_from: str = "command line",
) -> Settings:
    """Merges all layers. The tiny policy uses its own preset unless another one is named."""
    paths = resolve_paths(home)
    given = {key: value for key, value in (flags or {}).items() if value is not None}

    def load(preset_file: Path | None) -> LoadedConfig:
        return load_config(
            preset=preset_file,
            user_file=paths.user_config,
            config_file=config_file,
            assignments=assignments or (),
            flags=given,
            flags_from=flags_from,
        )

    loaded = load(_preset_file(preset) if preset else None)
    model, reason = resolve_model(
        loaded.config, builtin_folder("configs") / "models.toml", paths.model_choice
    )
    if model == "tiny" and preset is None:
        loaded = load(_preset_file("tiny"))
    return Settings(loaded.config, loaded.origins, paths, model, reason)


def presets(folder: Path) -> dict[str, Path]:
    """Returns the TOML files of the folder by preset name."""
    return {path.stem: path for path in sorted(folder.glob("*.toml")) if path.stem != "models"}


def _preset_file(name: str) -> Path:
    known = presets(builtin_folder("configs"))
    if name not in known:
        raise ConfigError(f"no preset {name!r}", hint=f"known presets: {', '.join(known)}")
    return known[name]


def _file_layer(origin: str, path: Path) -> ConfigLayer:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", hint="correct that line") from None
    values: dict[str, Any] = {}
    for section, content in tree.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{origin}: {section!r} is not in a section", hint=_closest(section))
        values.update({f"{section}.{key}": value for key, value in content.items()})  # type: ignore[misc]
    return ConfigLayer(origin, values)


def flat(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields settings by their full names, those of a section that is a nested dictionary among them."""
    for name, value in given.items():
        if name in SECTIONS and isinstance(value, Mapping):
            for key, one in cast(Mapping[str, Any], value).items():
                yield f"{name}.{key}", one
        else:
            yield name, value


def _environment_layers(environ: Mapping[str, str]) -> list[ConfigLayer]:
    layers: list[ConfigLayer] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in NOT_SETTINGS:
            continue
        key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        if "." not in key:
            raise ConfigError(f"{variable} is not a setting", hint=f"write {ENV_PREFIX}SECTION__KEY")
        layers.append(ConfigLayer(variable, {key: _parse_value(key, text)}))
    return layers


def _split_assignment(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text!r} has no '='", hint="write --set section.key=value")
    return key.strip(), _parse_value(key.strip(), value.strip())


def _parse_value(key: str, text: str) -> Any:
    """Returns a text as a TOML value (3, true, ["a"]). Returns the text itself if it is not TOML, or if the
    setting takes text and the value is something else."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    kinds: dict[Any, Any] = {str: str, SecretStr: str, tuple[str, ...]: (str, list)}
    return value if isinstance(value, kinds.get(_kind_of(key), object)) else text


def _kind_of(key: str) -> Any:
    """Returns the type of a setting, or of an entry of its table. None: there is no such setting."""
    kind: Any = Config
    for name in key.split("."):
        fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, Section) else {}
        kind = fields[name].annotation if name in fields else None
    return kind


def _unknown(key: str, origin: str) -> ConfigError:
    return ConfigError(f"unknown setting {key!r} ({origin})", hint=_closest(key))


def _closest(key: str) -> str:
    """Returns advice for an unknown key: the nearest known one. It tries a slip of one letter, another
    trainer's name, the name in another section, then the nearest by whole name and by last part."""
    tail = key.rpartition(".")[2]
    slips = difflib.get_close_matches(key, _NAMES, n=1, cutoff=0.94)
    theirs = next((advice for one in other_names() if (advice := one.advice(tail))), None)
    if theirs is not None and not slips:
        return theirs
    matches = (
        slips
        or [full for full in _NAMES if full.endswith(f".{tail}")]
        or difflib.get_close_matches(key, _NAMES, n=1, cutoff=0.6)
    )
    if not matches:
        tails = {full.partition(".")[2]: full for full in KEYS}
        matches = [tails[t] for t in difflib.get_close_matches(tail, tails, n=1, cutoff=0.6)]
    return f"Did you mean {matches[0]!r}?" if matches else "`swarmnode config show` lists every setting"


def advice_for_argument(name: str, known: Collection[str]) -> str:
    """Returns advice for an unknown keyword of a Node: the intended one, or the setting.

    >>> advice_for_argument("roundz", ["rounds", "home"])
    "Did you mean 'rounds'?"
    """
    for one in other_names():
        if (advice := one.advice_for_argument(name)) is not None:
            return advice
        if name in one.without:
            return _closest(name)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if close and not any(name in one.settings for one in other_names()):
        return f"Did you mean {close[0]!r}?"
    advice = _closest(name)
    stop = "" if advice.endswith(("?", ")", ".")) else "."
    return f"{advice}{stop} Pass settings as a dictionary: settings={{'section.name': value}}"


def _explain(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    origin = origins.get(".".join(map(str, first["loc"][:2])), "")
    if first["type"] == "extra_forbidden":
        return _unknown(key, origin)
    message = first["msg"].removeprefix("Value error, ")
    value = "..." if first["type"] == SECRET or _kind_of(key) is SecretStr else repr(first["input"])
    hint = "`swarmnode config show --explain` explains every setting"
    if first["type"] == "model_type":
        message, hint = (
            "it is a table",
            f"set its entries: {key}.{next(iter(_kind_of(key).model_fields))}=...",
        )
    elif first["type"] == "string_type":
        hint = 'put it in quotes, as in "12"'
    told = f"{key} = {value}: {message} ({origin})" if origin else message
    return ConfigError(told, hint=hint)
