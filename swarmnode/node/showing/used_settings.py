"""The settings that a node runs with, each with its origin, for people.

run.py -> [keep_settings] -> settings.json in the run's folder -> `swarmnode report`
[used_settings] -> extensions/page/
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from swarmnode.machine.storage import replace_file
from swarmnode.settings.config import KEYS, Config, explain_setting

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"


def used_settings(config: Config, origins: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns every setting as text, with its origin and its description; passwords are masked."""
    tree = config.model_dump(mode="json")
    default = Config().model_dump(mode="json")
    found: list[dict[str, str]] = []
    for key in KEYS:
        section, _, name = key.partition(".")
        value = tree[section][name]
        known = origins.get(key) or ("default" if value == default[section][name] else "set")
        shown = "unset" if value is None else msgspec.json.encode(value).decode().strip('"')
        found.append({"key": key, "value": shown, "origin": known, "meaning": explain_setting(key)})
    return found


def keep_settings(folder: Path, config: Config, origins: Mapping[str, str]) -> None:
    """Writes the settings of this start into the run's folder, to be read after the run."""
    try:
        replace_file(folder / SETTINGS_FILE, msgspec.json.encode(used_settings(config, origins)))
    except OSError as error:
        logger.warning("cannot save the settings to %s (%s)", folder, error.strerror)
