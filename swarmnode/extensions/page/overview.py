"""The state of a node as its page shows it: the status, and what follows from it in words.

page_server.py -> [overview, settings] -> routes.py -> JSON -> static/page.js
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from swarmnode.extensions.page.reward_history import RewardHistory
from swarmnode.extensions.page.verdicts import helping, learning, pace, sampler, why_little
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.node.showing.node_status import NodeStatus, invitation, joins_from, printable_status
from swarmnode.node.showing.page import PageSource
from swarmnode.node.showing.reasons import in_words
from swarmnode.settings.config import KEYS, Config, explain_setting
from swarmnode.training.records import OTHERS

MOST_AUTHORS = 64
"""Rows of the table of peers."""


def overview(source: PageSource, history: RewardHistory) -> dict[str, Any]:
    """Returns everything of the page but curves, rollouts and settings."""
    status, control = printable_status(source.status()), source.control
    return {
        "status": status,
        "verdicts": {
            "learning": learning(status, history),
            "helping": helping(status),
            "pace": pace(status),
            "sampler": sampler(status, history.rounds),
        },
        "why": why_little(status),
        "peers": peers(status),
        "dropped": in_words(status.exchange.dropped),
        "invitation": {"who": joins_from(status), "command": invitation(status)},
        "control": {
            "takes": control.takes,
            "paused": control.paused,
            "until": control.until,
            "ending": control.ending,
        },
        "week": "" if status.week.hours is None else status.week.told().removeprefix("this week: "),
        "newest_round": history.rounds[-1].round if history.rounds else 0,
    }


def peers(status: NodeStatus) -> list[dict[str, Any]]:
    """Returns whoever is connected or was learnt from, those who gave most first."""
    gave = status.exchange.trained
    connected = {one.peer: one.distance for one in status.network.connected}
    ids = sorted(gave.keys() | connected.keys(), key=lambda peer: (-gave.get(peer, 0), peer))
    waiting = set(status.training.doubted)
    return [
        {
            "peer": peer,
            "name": peer if peer == OTHERS else memorable_name(peer),
            "connected": connected.get(peer),
            "gave": gave.get(peer, 0),
            "waits": peer in waiting,
        }
        for peer in ids[:MOST_AUTHORS]
    ]


def settings(config: Config, origins: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns every setting as a text, with its origin and its sentence; passwords are stars."""
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
