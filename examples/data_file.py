"""A data set in a file (JSON lines, CSV), judged by a function of this script; it needs no answer column."""

import json
from pathlib import Path

import swarmnode as sn

FILE = Path("halves.jsonl")


def halved(prompts, completions, **columns):
    wanted = [int(prompt.removeprefix("Half of ").rstrip("?")) / 2 for prompt in prompts]
    return [float(text.strip() == f"{half:g}") for text, half in zip(completions, wanted, strict=True)]


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps({"question": f"Half of {n}?"}) + "\n" for n in range(100)))
    print(sn.run(FILE, halved, rounds=20))
