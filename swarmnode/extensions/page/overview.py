"""The state of a node as its page shows it: the status, and what follows from it in words.

page_server.py -> [overview] -> routes.py -> JSON -> static/page.js
"""

from typing import Any

from swarmnode.exchange.drop_reasons import in_words
from swarmnode.extensions.page.known_peers import known_peers
from swarmnode.extensions.page.reward_history import RewardHistory
from swarmnode.extensions.page.verdicts import helping, learning, pace, sampler, why_little
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.node.showing.node_status import invitation, joins_from, printable_status


def overview(source: NodeSource, history: RewardHistory) -> dict[str, Any]:
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
        "peers": known_peers(status),
        "dropped": in_words(status.exchange.dropped),
        "invitation": {"who": joins_from(status), "command": invitation(status)},
        "control": {
            "takes": control.takes,
            "paused": control.paused,
            "until": control.until,
            "ending": control.ending,
        },
        "week": "" if status.week.hours is None else status.week.in_words().removeprefix("this week: "),
        "newest_round": history.rounds[-1].round if history.rounds else 0,
    }
