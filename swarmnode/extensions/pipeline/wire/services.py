"""The services that members offer each other, and the bounds of each service.

[MemberService, LIMITS] -> member_streams.py (asks), incoming_streams.py (answers)

| service | messages | who may ask |
|---------|----------|-------------|
| HOPS | hop_messages.py | members of a plan that runs here; forward hops carry their data node's signature |
| GENERATION | rollouts/decode_messages.py | members of a plan that runs here |
| GRADIENTS | replication/replica_questions.py | members of the plan |
| STATES | states/state_questions.py | members of the pipeline |
| MEMBERSHIP | membership/membership_messages.py | anybody; presences are signed |
| PROBES | membership/link_probes.py | anybody, within an allowance |

The stream authenticates the asker, so only messages that are passed on need a signature.
"""

from dataclasses import dataclass
from enum import IntEnum

import msgspec

KIB, MIB = 1024, 1024 * 1024

MAX_TENSOR_BYTES = 64 * MIB
"""Largest tensor on the wire: 8 samples x 1024 tokens x width 2048 in float32."""

MAX_DEADLINE_S = 3600.0
"""Longest time that any answer may take."""


class MemberService(IntEnum):
    """A service that members offer each other, by its number in a frame."""

    HOPS = 1
    """Activations and gradients of training."""
    GENERATION = 2
    """Steps of generation."""
    GRADIENTS = 3
    """Agreement among the replicas of a stage."""
    STATES = 4
    """States of stages, and copies of them."""
    MEMBERSHIP = 5
    """Presence, status, proposals."""
    PROBES = 6
    """Measurements of links."""


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Bounds of one service's messages, without their payloads, and of its answers, without their bodies."""

    max_message_bytes: int
    max_answer_bytes: int
    longest_s: float
    """Longest time that an answer may take, whatever the asker allows."""


LIMITS = {
    # 2048 lengths and prompts, or 4096 micro-batches that came back.
    MemberService.HOPS: ServiceLimits(32 * KIB, KIB, MAX_DEADLINE_S),
    # Cells, starts, counts and forks of 1024 sequences.
    MemberService.GENERATION: ServiceLimits(32 * KIB, KIB, 60.0),
    # The digests of 64 replicas, or a bit for each of 8192 parameters.
    MemberService.GRADIENTS: ServiceLimits(KIB, 16 * KIB, 120.0),
    # The answer to an offered copy comes only after the copy was fetched.
    MemberService.STATES: ServiceLimits(KIB, 64 * KIB, 600.0),
    # A proposal carries the presences of 64 members, each of 32 KiB.
    MemberService.MEMBERSHIP: ServiceLimits(2 * MIB + 16 * KIB, 8 * KIB, 30.0),
    MemberService.PROBES: ServiceLimits(64, KIB, 30.0),
}
"""The bounds of each service."""


class MemberMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message from one member to another. Messages of a service have tags of their own."""

    @property
    def payload_bytes(self) -> int:
        """Number of bytes after the message, within bounds. Computed from the message, so that no sender has
        to state it."""
        return 0
