"""The `swarmnode` command: its sub-commands, and the one place where errors become exit codes.

shell -> [main] -> the one command that was called, imported then -> cli/*.py
"""

import errno
import logging
import os
import signal
import sys
from collections import UserDict
from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_group

from swarmnode import __version__
from swarmnode.cli.output import Json, complain, json_is_asked, tell
from swarmnode.errors import INTERRUPTED, ConfigError, SwarmnodeError, notes_of
from swarmnode.printable import printable
from swarmnode.registry import find, names

logger = logging.getLogger(__name__)

MisusedCommand: type[Exception] = typer.BadParameter.__bases__[0]
"""Error of a command line that cannot be parsed: click's UsageError, whose module depends on the version of
typer."""
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

SUMMARIES: Mapping[str, str] = {
    "join": "Join a swarm, or start one: ask, answer, share, listen, learn.",
    "swarm": "Run several nodes on this machine; create a private swarm.",
    "seed": "Run a seed: a stable address that connects others and does not train.",
    "status": "Show what the node running here is doing, learning and waiting for.",
    "pause": "Pause after the current round; `pause 2h` resumes by itself.",
    "resume": "Resume after a pause.",
    "finish": "Stop the node after the current round.",
    "stop": "Stop the node now, with a checkpoint.",
    "logs": "Print the log of the node that runs or ran here, and its errors.",
    "peers": "List the peers of the running node, and what they contributed.",
    "doctor": "Check whether this machine is ready to join, and what to fix.",
    "eval": "Measure a checkpoint or a model on held-out questions.",
    "export": "Save the adapter of a checkpoint, or the merged model.",
    "report": "Write one HTML file about a run: rewards, peers, times, rollouts.",
    "pull": "Fetch what `export --push` put on a hub, to continue it here.",
    "serve": "Serve the policy that trains here over an OpenAI-compatible API.",
    "chat": "Talk to the policy that trains here, or to a checkpoint.",
    "service": "Install a service that starts a node at boot.",
    "watch": "Show several machines on one screen.",
    "runs": "List the runs of this home; remove one.",
    "library": "Show, export and import verified right answers.",
    "task": "List, show, check, try and create tasks.",
    "pipeline": "Plan a pipeline of peers that skips stages.",
    "identity": "Show, back up and restore the key of this node.",
    "config": "Show settings and where they come from.",
    "version": "Print the version.",
}
"""A line for each of our commands, in the order of `swarmnode --help`, which thus imports none of them."""


class LazyCommands(UserDict[str, Any]):
    """Commands by name, each imported when it is looked up: calling one does not load the others."""

    def __getitem__(self, name: str) -> Any:
        found = find("command", self.data[name])
        holder = typer.Typer(rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            holder.command(name)(found)
        return get_group(holder).commands[name]


class LazyGroup(TyperGroup):
    """The group of all commands, ours and registered ones."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands({name: name for name in names("command")})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of this name. Raises ConfigError if it is one of ours and not installed."""
        if cmd_name in SUMMARIES and cmd_name not in self.commands:
            raise ConfigError(
                f"`swarmnode {cmd_name}` needs swarmnode.extensions, which is missing or incomplete",
                hint="reinstall swarmnode completely",
            )
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the table of commands. A registered command is imported for its own summary."""
        found = names("command")
        ours = [name for name in SUMMARIES if name in found]
        others: list[tuple[str, str]] = []
        for name in found:
            if name not in SUMMARIES:
                try:
                    others.append((name, self.commands[name].get_short_help_str()))
                except ConfigError as error:
                    logger.warning("skipped: %s", error)
        with formatter.section("Commands"):
            formatter.write_dl([*((name, SUMMARIES[name]) for name in ours), *others])


app = typer.Typer(
    name="swarmnode",
    cls=LazyGroup,
    help="Turn this machine into a member of a decentralized reinforcement-learning swarm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    asked: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if asked:
        version()
        raise typer.Exit


def version(json: Json = False) -> None:
    """Print the version."""
    tell(json, {"version": __version__}, [f"swarmnode {__version__}"])


def main() -> None:
    """Entry point of the console script."""
    # Until a node handles its signals (stop_signals.py), SIGTERM of a supervisor acts like Ctrl-C: the first
    # process of a container would otherwise ignore it and be killed when the supervisor's patience ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # typer reports errors in the options as text; we report them as JSON.
        raise SystemExit(app(standalone_mode=not json_is_asked()))
    except MisusedCommand as error:
        complain(cast(Any, error).format_message(), "", cast(Any, error).exit_code)
    except SwarmnodeError as error:
        for note in notes_of(error):
            print("\n".join(map(printable, note.splitlines())), file=sys.stderr)
        complain(error.message, error.hint, error.exit_code)
    except BrokenPipeError:
        # The reader of our output is gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in DISK_TROUBLE:
            raise
        complain(
            f"{error.strerror}: {error.filename or 'standard output'}",
            "free space there, or choose another location",
            3,
        )
    except (KeyboardInterrupt, Exception) as error:
        # Ctrl-C while a large library is imported may surface as any error of that library.
        if not _was_interrupted(error):
            raise
        complain("interrupted", "", INTERRUPTED)


def _was_interrupted(error: BaseException) -> bool:
    cause: BaseException | None = error
    for _ in range(20):
        if cause is None or isinstance(cause, KeyboardInterrupt):
            break
        cause = cause.__cause__ or cause.__context__
    return isinstance(cause, KeyboardInterrupt)
