"""Bodies: which to fetch, from which peers, how they are handed on, and the buffer that their groups wait
in."""
