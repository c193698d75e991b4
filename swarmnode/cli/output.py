"""One rule for the output of commands: lines for people or, with `--json`, one JSON document on stdout.

command -> [tell] -> stdout; its error -> app.py: main -> [complain] -> stderr, or with `--json` stdout, too
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from swarmnode.printable import printable

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def tell(json: bool, value: object, lines: Iterable[Any]) -> None:
    """Prints `lines` as they come, as text or drawn by rich; or instead `value` as JSON, in which objects
    without a JSON form appear as text."""
    if json:
        typer.echo(msgspec.json.encode(value, enc_hook=str).decode())
        return
    for line in lines:
        if isinstance(line, str):
            typer.echo(line)
        else:
            from rich.console import Console

            Console().print(line)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields one line per row, with aligned columns. The texts may come from strangers.

    >>> list(table([("name", "n"), ("b", "12")]))
    ['name  n', 'b     12']
    """
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def json_is_asked() -> bool:
    """Returns True if this command should print JSON, even if its options cannot be parsed."""
    return "--json" in sys.argv[1:]


def complain(what: str, hint: str, exit_code: int) -> NoReturn:
    """Prints an error, which may quote a peer, and ends the process with this code."""
    if json_is_asked():
        tell(True, {"error": printable(what), "next": printable(hint), "exit_code": exit_code}, ())
    else:
        print(f"error: {printable(what)}", file=sys.stderr)
        if hint:
            print(f"  next: {printable(hint)}", file=sys.stderr)
    raise SystemExit(exit_code) from None
