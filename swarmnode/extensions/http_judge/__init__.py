"""Judges behind a URL: a language model, or any scorer, that is asked over HTTP."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "judge": {"http": "swarmnode.extensions.http_judge.http_judge:HttpJudge"},
}
