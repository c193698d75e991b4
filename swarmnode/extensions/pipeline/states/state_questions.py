"""Questions between members about stage states, and their answers. All are bounded and strictly typed.

state_service.py -> [state_questions] -> member_streams.py -> a member's state_service.py
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.extensions.pipeline.states.holdings import Holding
from swarmnode.extensions.pipeline.wire.hop_messages import Count, Digest
from swarmnode.extensions.pipeline.wire.services import MemberMessage

MAX_HOLDINGS = 32
"""Most holdings that one member may report."""


class AskHoldings(MemberMessage, frozen=True, tag="holdings"):
    """Asks a member for the `Holdings` that it has."""


class AskState(MemberMessage, frozen=True, tag="state"):
    """Asks for the size of a state, followed by its bytes from `offset` on."""

    digest: Digest
    offset: Count


class OfferCopy(MemberMessage, frozen=True, tag="copy"):
    """Asks a member to keep a copy of this state. The answer is True once it is kept, or False if it is
    not."""

    holding: Holding


StateQuestion = AskHoldings | AskState | OfferCopy


class Holdings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The states that a member holds."""

    held: Annotated[tuple[Holding, ...], Meta(max_length=MAX_HOLDINGS)]
