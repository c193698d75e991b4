"""The text of an answer while its tokens arrive: whole characters only, and nothing after a stop text.

answering_service.py (token ids) -> [TextStream] -> text that is certain
"""

from collections.abc import Callable, Sequence

MOST_TOKENS_OF_A_CHARACTER = 4


class TextStream:
    """The text of one answer so far.

    >>> stream = TextStream(lambda ids: "".join(map(chr, ids)), ("END",))
    >>> stream.add([72, 105, 69]), stream.add([78, 68, 33]), stream.stopped
    ((['H', 'i', 'E'], 'Hi'), (['N', 'D', '!'], ''), True)
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._before = self._told = 0
        """The last piece of text is that of the tokens between these two positions."""
        self._held = ""
        self.stopped = False
        """True once a stop text has come: anything after it is not part of the answer."""

    def add(self, token_ids: Sequence[int]) -> tuple[list[str], str]:
        """Returns the text of each new token, and the text that is now certain. A character made of several
        tokens is given with its last one."""
        pieces = [self._piece(token) for token in token_ids]
        return pieces, self._certain("".join(pieces))

    def end(self) -> str:
        """Returns the text that was held back, at the end of an answer."""
        rest = self._decode(self._ids[self._before :])[
            len(self._decode(self._ids[self._before : self._told])) :
        ]
        certain = self._certain(rest)
        held, self._held = self._held, ""
        return certain if self.stopped else certain + held

    def _piece(self, token: int) -> str:
        # Some tokenizers drop a space before the first token, so decode the preceding tokens too.
        self._ids.append(token)
        known = self._decode(self._ids[self._before : self._told])
        text = self._decode(self._ids[self._before :])[len(known) :]
        if text.endswith("\ufffd") and len(self._ids) - self._told < MOST_TOKENS_OF_A_CHARACTER:
            return ""
        self._before, self._told = self._told, len(self._ids)
        return text

    def _certain(self, text: str) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        found = min((place for stop in self._stops if (place := held.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            return held[:found]
        may_begin = (n for stop in self._stops for n in range(1, len(stop)) if held.endswith(stop[:n]))
        keep = max(may_begin, default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]
