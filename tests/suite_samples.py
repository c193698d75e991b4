"""Small files in the formats of the standard evaluations."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

GSM8K: tuple[Row, ...] = (
    {"question": "What is 6 times 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
    {"question": "What is 500 + 500?", "answer": "It is 1,000.\n#### 1,000"},
)
MATH: tuple[Row, ...] = (
    {"problem": "Half of one?", "level": "Level 1", "type": "Algebra", "solution": r"$\boxed{\frac{1}{2}}$"},
    {"problem": "A pair?", "solution": r"It is $\boxed{(1,2)}$.", "answer": "(1,2)"},
)
IFEVAL: tuple[Row, ...] = (
    {
        "key": 1000,
        "prompt": "Write two words without a comma.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"relation": "at least", "num_words": 2}],
    },
    {
        "key": 1001,
        "prompt": "Answer in Finnish and without a comma.",
        "instruction_id_list": ["punctuation:no_comma", "language:response_language"],
        "kwargs": [{}, {"language": "fi"}],
    },
)
HUMANEVAL: tuple[Row, ...] = (
    {
        "task_id": "HumanEval/0",
        "prompt": 'def double(n):\n    """Twice n."""\n',
        "entry_point": "double",
        "canonical_solution": "    return 2 * n\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    },
)


def json_lines(path: Path, rows: Iterable[Row]) -> Path:
    """Write a row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
