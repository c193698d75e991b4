"""Questions that the replicas of a stage ask each other at the end of an iteration.

replica_exchange.py -> [averaging_messages] -> member_streams.py -> replica_answers.py of a replica
"""

from typing import Annotated

from msgspec import Meta

from swarmnode.extensions.pipeline.replication.gradient_exchange import StageIteration
from swarmnode.extensions.pipeline.wire.services import MemberMessage
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS

MAX_ROUNDS = 6
"""Bound of the rounds of agreeing on contributors. One round more than deaths in as many rounds, which a
stage with few replicas does not survive."""

NOT_HERE = "not_here"
"""Reason when a replica holds no contribution of another, or does not any more. An empty head says so."""


class StageQuestion(MemberMessage, frozen=True):
    exchange: StageIteration


class AskGradients(StageQuestion, frozen=True, tag="gradients"):
    """Asks for a contribution: its sealed head, with its bytes behind it."""

    author: Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)]


class AskHeldGradients(StageQuestion, frozen=True, tag="holdings"):
    """Asks for the `SeenHeads` at the end of a round."""

    round: Annotated[int, Meta(ge=0, lt=MAX_ROUNDS)]


class AskDigest(StageQuestion, frozen=True, tag="digest"):
    """Asks for the `ReplicaWeights`: digests of the weights after the step, and before."""


Question = AskGradients | AskHeldGradients | AskDigest
