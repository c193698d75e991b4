"""Libraries as files, for people: shown, judged, exported and imported, each row verified."""

from swarmnode.registry import Parts

PARTS: Parts = {"command": {"library": "swarmnode.extensions.library_files.library_commands:app"}}
