"""What a person types. Every command imports what it needs when it runs, so that --help is instant."""

from swarmnode.machine.installing import NAMESAKE_ADVICE, find_namesake

# Before any other module of ours is imported: it may not be ours any more.
if (_namesake := find_namesake()) is not None:
    raise SystemExit(f"error: {_namesake}\n  next: {NAMESAKE_ADVICE}")
