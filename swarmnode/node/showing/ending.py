"""The end of a run: the last line that `swarmnode join` prints, and the exit code.

outcomes of the policies (Summary or error) -> [ending] -> Ending -> cli join
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from swarmnode.errors import StorageError, SwarmnodeError, plain_error
from swarmnode.node.showing.node_status import Summary


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run: the last line to print, and the process's exit code."""

    line: str
    exit_code: int = 0


def ending(peers: Sequence[str], outcomes: Sequence[Summary | BaseException]) -> Ending:
    """Returns the last line: one policy's summary, or for several the outcome of each and the totals.
    `peers`: the peer ids of the policies.

    If no policy ended well, raises the error of one of them: a defect of ours rather than an error that
    people can do something about. Otherwise the exit code is that of the worst outcome.
    """
    errors = [plain_error(one) for one in outcomes if isinstance(one, BaseException)]
    defects = [error for error in errors if not isinstance(error, SwarmnodeError)]
    done = [one for one in outcomes if isinstance(one, Summary)]
    if not done:
        raise [*defects, *errors][0]
    code = StorageError.exit_code if any(summary.not_saved for summary in done) else 0
    if len(peers) == 1:
        return Ending(msgspec.json.encode(done[0]).decode(), code)
    policies = [_entry(peer, outcome) for peer, outcome in zip(peers, outcomes, strict=True)]
    totals = {
        "rounds": sum(summary.rounds for summary in done),
        "tokens": sum(summary.tokens for summary in done),
        "seconds": max(summary.seconds for summary in done),
        "failed": len(errors),
    }
    code = 1 if defects else next((e.exit_code for e in errors if isinstance(e, SwarmnodeError)), code)
    return Ending(msgspec.json.encode({"policies": policies, "totals": totals}).decode(), code)


def _entry(peer: str, outcome: Summary | BaseException) -> dict[str, Any]:
    if isinstance(outcome, Summary):
        return asdict(outcome)
    error = plain_error(outcome)
    text = str(error) if isinstance(error, SwarmnodeError) else f"{type(error).__name__}: {error}"
    return {"peer": peer, "error": text}
