"""Bodies: which to fetch, from whom, how they are handed on, and the buffer that their groups wait in."""
