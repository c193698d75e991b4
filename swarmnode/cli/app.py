"""The `swarmnode` command: its sub-commands, and the one place where errors become exit codes."""

import os
import sys

import typer

from swarmnode.cli import config, doctor, evaluate, export, identity, join, status, swarm, task
from swarmnode.errors import SwarmnodeError

app = typer.Typer(
    name="swarmnode",
    help="Turn this machine into a member of a decentralized reinforcement-learning swarm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("join")(join.join)
app.command("swarm")(swarm.swarm)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.add_typer(task.app, name="task")
app.add_typer(identity.app, name="identity")
app.add_typer(config.app, name="config")


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SwarmnodeError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  next: {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
