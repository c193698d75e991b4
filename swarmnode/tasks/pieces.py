"""Numbers for the pieces of a text, for rewards that count tokens: the same on every node, for any model.

rewards.py -> [pieces_of] -> a reward that insists on completion_ids

A node has token ids of its own, and scores strangers' texts that it never had ids of. Words of up to eight
letters, up to three digits, and single signs are about as many as the tokens of a common vocabulary, and a
phrase that repeats repeats here too. They cannot be decoded.
"""

import re
import zlib

# Bytes: what counts as a letter beyond ASCII changes with the version of Python.
_PIECE = re.compile(rb" ?[A-Za-z]{1,8}| ?[0-9]{1,3}|[\x80-\xff]{1,4}|\s+|.", re.DOTALL)


def pieces_of(text: str) -> list[int]:
    """A number for each piece; equal pieces have equal numbers.

    >>> len(pieces_of("What is 12 + 34?")), pieces_of("no no")[0] == pieces_of("no")[0]
    (7, True)
    """
    return [zlib.crc32(piece) for piece in _PIECE.findall(text.encode(errors="replace"))]
