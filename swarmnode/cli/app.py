"""The `swarmnode` command: its sub-commands, and the one place where errors become exit codes."""

import errno
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from swarmnode import __version__
from swarmnode.cli import (
    config,
    doctor,
    evaluate,
    export,
    identity,
    join,
    pipeline,
    seed,
    status,
    swarm,
    task,
)
from swarmnode.errors import INTERRUPTED, SwarmnodeError
from swarmnode.printable import printable

DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
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
app.command("seed")(seed.seed)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.add_typer(task.app, name="task")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(identity.app, name="identity")
app.add_typer(config.app, name="config")


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"swarmnode {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    # Until a node has handlers of its own, a supervisor's SIGTERM is what Ctrl-C is: the first process of a
    # container would otherwise not hear it at all, and be killed when the supervisor's patience ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except SwarmnodeError as error:
        _complain(error.message, error.hint, error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in DISK_TROUBLE:
            raise
        _complain(f"{error.strerror}: {error.filename or 'standard output'}", "free space or use --home", 3)
    except KeyboardInterrupt:
        _complain("stopped before the node was up", "nothing was lost", INTERRUPTED)
    except Exception as error:
        # Ctrl-C while a large library is being imported surfaces as whatever that library makes of it.
        if not _was_interrupted(error):
            raise
        _complain("stopped before the node was up", "nothing was lost", INTERRUPTED)


def _complain(what: str, hint: str, exit_code: int) -> NoReturn:
    # A message may quote a peer.
    print(f"error: {printable(what)}", file=sys.stderr)
    if hint:
        print(f"  next: {printable(hint)}", file=sys.stderr)
    raise SystemExit(exit_code) from None


def _was_interrupted(error: BaseException) -> bool:
    cause: BaseException | None = error
    for _ in range(20):
        if cause is None or isinstance(cause, KeyboardInterrupt):
            break
        cause = cause.__cause__ or cause.__context__
    return isinstance(cause, KeyboardInterrupt)
