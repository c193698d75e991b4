"""The exchanges of one process, which hand each other what they publish.

give -> [Neighbourhood.hand] -> Inbox.take of each other policy of this process -> pool

They have one owner, one model and one tokenizer, so a group is passed on as it is: nothing is fetched,
decoded, tokenized or scored again. It is chosen among those of other authors, and ages, as any group does.
Towards everybody else each policy is a member like any other.
"""

from collections.abc import Callable, Collection

from swarmnode.exchange.messages import Given, Header

Take = Callable[[str, Header, bytes, Given], None]
"""Called with (author, header, the header as it is sealed for others, the group)."""


class Neighbourhood:
    """Whose exchange runs in this process, by peer id. All of them live on one event loop."""

    def __init__(self) -> None:
        self._takers: dict[str, Take] = {}
        self._meets_others: dict[str, bool] = {}

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._takers

    def enter(self, peer_id: str, take: Take) -> None:
        """Adds a member: `take` is given what the others publish from now on."""
        self._takers[peer_id] = take

    def leave(self, peer_id: str) -> None:
        self._takers.pop(peer_id, None)
        self._meets_others.pop(peer_id, None)

    def has_others(self, peer_id: str) -> bool:
        return bool(self._takers.keys() - {peer_id})

    def hand(self, author: str, header: Header, sealed: bytes, given: Given) -> None:
        """Give a group of `author` to all others."""
        for peer_id, take in self._takers.items():
            if peer_id != author:
                take(author, header, sealed, given)

    def is_heard_outside(self, peer_id: str, connected: Collection[str]) -> bool:
        """Returns True if anybody else could hear us, when `peer_id` is connected to these. A header that one
        of us gossips reaches whoever another of us is connected to, so the others' last answers count too.

        >>> neighbourhood = Neighbourhood()
        >>> neighbourhood.enter("a", print), neighbourhood.enter("b", print)
        (None, None)
        >>> neighbourhood.is_heard_outside("a", ["b"]), neighbourhood.is_heard_outside("b", ["a", "stranger"])
        (False, True)
        >>> neighbourhood.is_heard_outside("a", ["b"])
        True
        """
        self._meets_others[peer_id] = not all(other in self for other in connected)
        return any(self._meets_others.values())
