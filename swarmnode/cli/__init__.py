"""The commands of the shell. Each is imported when it is called, so that --help is instant."""

from swarmnode.machine.installing import NAMESAKE_ADVICE, find_namesake

# Checked before any other module of ours is imported, which may belong to the other project.
if (_namesake := find_namesake()) is not None:
    raise SystemExit(f"error: {_namesake}\n  next: {NAMESAKE_ADVICE}")
