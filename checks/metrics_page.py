"""Makes the tables of docs/metrics.md from the sentences under NodeStatus's fields and the reasons.

node/showing/node_status.py, training/records.py, exchange/drop_reasons.py -> [table] -> docs/metrics.md

`python checks/metrics_page.py` writes it anew; the suite says when that is due.
"""

from pathlib import Path

from swarmnode.exchange.drop_reasons import Reason
from swarmnode.extensions.page.prometheus_metrics import fields_of, sentences

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
REASONS = """## Why not used

`NAME` of `exchange.dropped` and `exchange.unpublished`, and the panel's row "dropped". The log has the
first of each reason, with its author and cause, and `swarmnode peers` all of one peer. Points are taken from
an author's score of 100, below 20 it is banned. On both sides that looks like a bad line: who bans its only
seed is `alone`, and who was banned connects and is disconnected again and again; only the other operator
can say why.

`other_version`: compare with `swarmnode task show FILE` on both machines. `false_claim`: the reward depends
on more than the answer (a clock, a seed, a file), or somebody lies; `swarmnode task check` tries it twice.

To change a rule, search `swarmnode/exchange/` for `Reason.` and the name in capitals; `too_long` is in
`_completion` and `false_claim` in `is_false_claim`, both of `validation/body_check.py`. Bounds are in
`swarmnode/exchange/limits.py`, tests of the checks in `tests/unit/exchange/validation/`."""
MARK = "<!-- Made by checks/metrics_page.py of the sentences under the fields: change them there. -->\n"


def table() -> str:
    """The page from the mark on."""
    rows = list(fields_of())
    head = "| | |\n|---|---|\n"
    numbers, rest = (
        "\n".join(f"| `{name}` | {told} |" for name, is_number, told in rows if is_number == wanted)
        for wanted in (True, False)
    )
    texts = f"Texts and lists, which only the status has:\n\n{head}{rest}\n"
    return f"{MARK}\n{head}{numbers}\n\n{texts}\n{REASONS}\n\n{reasons()}\n"


def reasons() -> str:
    """The table of the reasons why something was not used."""
    told = sentences(Reason)
    rows = (f"| `{code}` | {code.words} | {told.get(code.name, '')} | {code.points:g} |" for code in Reason)
    return "\n".join(("| `NAME` | on the panel | rule | points |", "|---|---|---|---|", *rows))


def page() -> str:
    """The whole page as it should be."""
    return PAGE.read_text().partition(MARK)[0] + table()


if __name__ == "__main__":
    PAGE.write_text(page())
