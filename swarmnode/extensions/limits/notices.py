"""Tells the operator that something is wrong: on the desktop, or by a webhook.

trouble_watch.py, machine_guard.py -> [send_notice] -> notify-send, or a POST to node.notify

A notice is made of words of ours, the node's name and numbers: no path, no text of an error, no setting. It
is sent once; who does not take it is told of in the log without the address, which may be a secret.
"""

import logging
import shutil
import subprocess
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec

from swarmnode.settings.config import DESKTOP

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Longest that one notice may take."""

TITLE = "swarmnode"


class NoRedirects(HTTPRedirectHandler):
    """Goes nowhere that the operator did not name."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        return None


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
    content = Request(url, msgspec.json.encode({"text": words}), {"Content-Type": "application/json"})
    try:
        build_opener(NoRedirects).open(content, timeout=TIMEOUT_S).close()
    except HTTPError as error:
        error.close()
        return f"the webhook answers {error.code}"
    except (OSError, HTTPException):
        return "the webhook cannot be reached"
    return ""
