"""Questions that the replicas of a stage ask each other at the end of an iteration, and their answers.

replica_exchange.py -> [averaging_messages] -> questions.py -> a replica's replica_exchange.py
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.replication.contribution_tally import SeenHeads
from swarmnode.extensions.pipeline.replication.gradient_exchange import ContributionFault, StageIteration
from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaWeights
from swarmnode.extensions.pipeline.wire.hop_messages import MAX_PATH, Count, Digest
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS

PROTOCOL = "/swarmnode/pipeline-gradients/1"
MAX_ROUNDS = 6
"""Bound of the rounds of agreeing on contributors. One round more than deaths in as many rounds, which a
stage with few replicas does not survive."""

NOT_HERE = "not_here"
"""Reason when a replica holds no contribution of another, or does not any more. An empty head says so."""


class StageQuestion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    plan: Digest
    stage: Annotated[int, Meta(ge=0, lt=MAX_PATH)]
    iteration: Count

    @property
    def exchange(self) -> StageIteration:
        return StageIteration(self.plan, self.stage, self.iteration)


class AskGradients(StageQuestion, frozen=True, kw_only=True, tag="gradients"):
    """Asks for a contribution: a signed head with its bytes behind it."""

    author: Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)]


class AskHeldGradients(StageQuestion, frozen=True, kw_only=True, tag="holdings"):
    round: Annotated[int, Meta(ge=0, lt=MAX_ROUNDS)]


class AskDigest(StageQuestion, frozen=True, kw_only=True, tag="digest"):
    """Asks for the digests of the weights after the step, and before."""


Question = AskGradients | AskHeldGradients | AskDigest
_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_holdings = msgspec.msgpack.Decoder(SeenHeads)
_weights = msgspec.msgpack.Decoder(ReplicaWeights)


def encode(message: Question | SeenHeads | ReplicaWeights) -> bytes:
    return _encoder.encode(message)


def decode_question(data: bytes) -> Question:
    """Decode a question. Raises Rejected: malformed."""
    return _decode(_questions, data)


def decode_holdings(data: bytes) -> SeenHeads:
    """Decode the holdings of a replica. Raises Rejected: malformed."""
    return _decode(_holdings, data)


def decode_weights(data: bytes) -> ReplicaWeights:
    """Decode a replica's report of its weights. Raises Rejected: malformed."""
    return _decode(_weights, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected(ContributionFault.MALFORMED, str(error)) from error
