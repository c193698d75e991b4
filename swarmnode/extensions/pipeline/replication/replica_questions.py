"""Questions that the replicas of a stage ask each other at the end of an iteration.

replica_exchange.py -> [replica_questions] -> member_streams.py -> replica_answers.py of a replica
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.extensions.pipeline.replication.gradient_exchange import StageIteration
from swarmnode.extensions.pipeline.wire.hop_messages import Digest
from swarmnode.extensions.pipeline.wire.services import MemberMessage
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS

MAX_REPLICAS = 64


class StageQuestion(MemberMessage, frozen=True):
    stage_iteration: StageIteration


class AskGradients(StageQuestion, frozen=True, tag="gradients"):
    """Asks for a replica's contribution: its `Head`, followed by the bytes."""


class AskHeld(StageQuestion, frozen=True, tag="held"):
    """Asks for the `HeldContributions`, once the replica has gathered all that it will get."""


class AskDigest(StageQuestion, frozen=True, tag="digest"):
    """Asks for the `ReplicaWeights`: the digests of the weights after the step and before it."""


Question = AskGradients | AskHeld | AskDigest


class HeldContributions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sound contributions that a replica holds, including its own."""

    digests: Annotated[
        dict[Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)], Digest], Meta(max_length=MAX_REPLICAS)
    ]
    """Digests by author."""
