"""The exchanges of one process, which hand each other the groups that they publish.

as_given -> [Neighbourhood.hand] -> Inbox.take_from_neighbour of each other policy of this process -> pool

They have one owner, one model and one tokenizer, so a group is passed on as it is: nothing is fetched,
decoded, tokenized or scored again. The group is then chosen like those of other authors, and ages like any
group. To all other nodes, each policy is a member like any other.
"""

from collections.abc import Callable, Collection

from swarmnode.exchange.messages import Given, Header

Take = Callable[[str, Header, bytes, Given], None]
"""Called with (author, header, the header as sealed for other nodes, the group)."""


class Neighbourhood:
    """The exchanges of this process, by peer id. All of them run on one event loop."""

    def __init__(self) -> None:
        self._takers: dict[str, Take] = {}
        self._meets_others: dict[str, bool] = {}

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._takers

    def enter(self, peer_id: str, take: Take) -> None:
        """Adds a member: from now on, `take` is called with the groups that the others publish."""
        self._takers[peer_id] = take

    def leave(self, peer_id: str) -> None:
        self._takers.pop(peer_id, None)
        self._meets_others.pop(peer_id, None)

    def has_others(self, peer_id: str) -> bool:
        return bool(self._takers.keys() - {peer_id})

    def hand(self, author: str, header: Header, sealed: bytes, given: Given) -> None:
        """Gives a group of `author` to all other members."""
        for peer_id, take in self._takers.items():
            if peer_id != author:
                take(author, header, sealed, given)

    def is_heard_outside(self, peer_id: str, connected: Collection[str]) -> bool:
        """Returns True if a peer outside this process could hear us, while `peer_id` is connected to
        `connected`. A header that one member gossips reaches every peer that another one is connected to, so
        the connections that the other members last reported count too.

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
