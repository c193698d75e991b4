"""Puzzles that need nothing but their name, and are none of the eight: no tiny policy can solve them."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "builtin": {
        "countdown": "swarmnode.extensions.puzzles.puzzles:COUNTDOWN",
        "sudoku": "swarmnode.extensions.puzzles.puzzles:SUDOKU",
    },
}
