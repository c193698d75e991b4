"""`python -m swarmnode` is the `swarmnode` command."""

from swarmnode.cli.app import main

main()
