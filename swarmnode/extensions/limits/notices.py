"""Tells the operator that something is wrong: on the desktop, or by a webhook.

trouble_watch.py, machine_guard.py -> [send_notice] -> notify-send, or a POST to node.notify

A notice is made of words of ours, the node's name and numbers: no path, no text of an error, no setting. It
is sent once; who does not take it is told of in the log without the address, which may be a secret.
"""

import logging
import shutil
import subprocess
import threading
from http.client import HTTPException
from urllib.parse import urlsplit

from swarmnode.node.building.page_client import PageAddress, fetch
from swarmnode.settings.config import DESKTOP

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Longest that one notice may take."""

TITLE = "swarmnode"

UNREACHED = "the webhook cannot be reached"


def send_notice(to: str, words: str) -> None:
    """Sends a notice to `desktop` or to a URL; to nobody where it is empty."""
    if not to:
        return
    trouble = _to_desktop(words) if to == DESKTOP else _to_webhook(to, words)
    if trouble:
        logger.warning("a notice was not delivered: %s", trouble)


def _to_desktop(words: str) -> str:
    program = shutil.which("notify-send")
    if program is None:
        return "there is no notify-send on this machine"
    try:
        done = subprocess.run(
            (program, "--app-name", TITLE, "--", TITLE, words),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "notify-send does not answer"
    return f"notify-send ended with {done.returncode}" if done.returncode else ""


def _to_webhook(url: str, words: str) -> str:
    """Posts {"text": words}, as Slack, Mattermost and most others take it. Returns what went wrong."""
    trouble = [UNREACHED]

    def post() -> None:
        trouble[0] = _posted(url, words)

    # Left behind when its time is over: a name that nobody looks up and an answer in drops have no end.
    thread = threading.Thread(target=post, name="notice", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return trouble[0]


def _posted(url: str, words: str) -> str:
    parts = urlsplit(url)
    is_tls, query = parts.scheme == "https", f"?{parts.query}" if parts.query else ""
    try:
        page = PageAddress(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls=is_tls)
        status, _ = fetch(page, f"{parts.path or '/'}{query}", {"text": words})
    except (OSError, HTTPException, ValueError):  # ValueError: a name of a host that cannot be one.
        return UNREACHED
    return "" if 200 <= status < 300 else f"the webhook answered {status}"
