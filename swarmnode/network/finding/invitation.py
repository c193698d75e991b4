"""Invitations: everything that a machine needs to join a swarm, as one short string to be pasted anywhere.

status.py -> [Invitation.text] -> a person -> `swarmnode join sn1:...` -> [read_invitation] -> settings

The string is `sn1:` followed by base64url without padding of msgpack: the swarm's name, the addresses to dial
first in their binary form and, for a private swarm, its key. The number is the version; a later one is
refused by name.
"""

import base64
import re

import msgspec

from swarmnode.errors import NetworkError
from swarmnode.network.multiaddr import address_from_bytes, address_to_bytes, split_peer

PREFIX = "sn1:"
"""Prefix of every invitation of this version."""

MAX_SEEDS = 4
"""Most seeds of an invitation. One address is enough to join a swarm; the others are there in case it is
down."""

MAX_NAME_CHARS = 63
MAX_KEY_BYTES = 72
MAX_INVITATION_CHARS = 2048
"""Longest invitation in characters. Four relayed addresses, a name and a key stay below."""

_ANY_VERSION = re.compile(r"sn([0-9]{1,4}):")
_HINT = "ask for a new one, and paste all of it: it looks like sn1:k6hjb21tb25z..."


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a machine needs to join one swarm."""

    name: str = "commons"
    """The swarm's name."""
    seeds: tuple[str, ...] = ()
    """Addresses to dial first, each ending in /p2p/<peer id>; at most MAX_SEEDS."""
    key: bytes = b""
    """Key of a private swarm. Empty: everybody may join."""

    def text(self) -> str:
        """Returns the invitation as a string. Raises NetworkError for one that nobody could read.

        >>> Invitation(name="friends").text()
        'sn1:k6dmcmllbmRzkMQA'
        """
        seeds = tuple(address_to_bytes(seed) for seed in self.seeds)
        packed = msgspec.msgpack.encode(_Packed(self.name, seeds, self.key))
        text = PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")
        read_invitation(text)
        return text


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    seeds: tuple[bytes, ...]
    key: bytes


_decoder = msgspec.msgpack.Decoder(_Packed)


def is_invitation(text: str) -> bool:
    """Returns True for text that claims to be an invitation, of any version.

    >>> is_invitation("sn1:k6dmcmllbmRzkMQA"), is_invitation("/ip4/192.0.2.7/tcp/4001")
    (True, False)
    """
    return _ANY_VERSION.match(text) is not None


def read_invitation(text: str) -> Invitation:
    """Returns the contents of an invitation; every address in it can be dialled. Raises NetworkError.

    >>> read_invitation("sn1:k6dmcmllbmRzkMQA").name
    'friends'
    """
    version = _ANY_VERSION.match(text)
    if version is None:
        raise NetworkError(f"{text[:20]!r} is not an invitation", hint=_HINT)
    if not text.startswith(PREFIX):
        raise NetworkError(f"invitation version {version[1]} is not supported", hint="update swarmnode")
    if len(text) > MAX_INVITATION_CHARS:
        raise NetworkError(f"an invitation of {len(text)} characters is too long", hint=_HINT)
    try:
        packed = _decoder.decode(_bytes_of(text.removeprefix(PREFIX)))
    except (ValueError, msgspec.MsgspecError) as error:
        raise NetworkError(
            "the invitation is damaged: part of it is missing or changed", hint=_HINT
        ) from error
    if not 0 < len(packed.name) <= MAX_NAME_CHARS or len(packed.key) > MAX_KEY_BYTES:
        raise NetworkError(
            "the invitation is damaged: its name or its key is too long or missing", hint=_HINT
        )
    if len(packed.seeds) > MAX_SEEDS:
        raise NetworkError(
            f"the invitation names {len(packed.seeds)} addresses, at most {MAX_SEEDS}", hint=_HINT
        )
    seeds = tuple(address_from_bytes(seed) for seed in packed.seeds)
    for seed in seeds:
        split_peer(seed)
    return Invitation(name=packed.name, seeds=seeds, key=packed.key)


def _bytes_of(text: str) -> bytes:
    """Returns the bytes behind base64url without padding. Raises ValueError for anything else."""
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if base64.urlsafe_b64encode(data).decode().rstrip("=") != text:
        raise ValueError("it is not in canonical form")
    return data
