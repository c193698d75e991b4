"""The formats of standard evaluations: the columns that identify each, its prompt, and its right answer."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.extensions.suites.code_tests import passes_tests
from swarmnode.extensions.suites.instructions import fault_of_instructions, follows_all, unknown_instruction
from swarmnode.extensions.suites.shots import GSM8K_SHOTS, MATH_SHOTS
from swarmnode.extensions.suites.suite_rows import Columns
from swarmnode.tasks.judging.answers import hashed, last_boxed, same_math, same_number


@dataclass(frozen=True, slots=True)
class Prompting:
    """The form in which questions are asked."""

    chat: bool
    """True if the model has a chat template, which is put around the prompt."""
    shots: int | None = None
    """Most worked examples to show. None: none for a chat model, all of the format's for any other."""


@dataclass(frozen=True, slots=True)
class SuiteFormat:
    """One format."""

    name: str
    columns: Mapping[str, type]
    """Columns of every row, by which the format is recognized."""
    ask: Callable[[Columns, Prompting], str]
    judge: Callable[[Columns, Sequence[str]], list[float | None]]
    """1.0 for a right answer, 0.0 for a wrong one, None where it cannot be known."""
    fault: Callable[[Columns], str | None] = lambda columns: None
    """Returns the defect of a row that has the columns, or None."""
    unknown: Callable[[Columns], str | None] = lambda columns: None
    """Returns the reason why no answer to a row can be judged, or None."""
    shots: int = 0
    """Number of worked examples that the format has."""
    stops: tuple[str, ...] = ()
    """Stop strings: an answer ends at the first of them."""

    def shots_of(self, prompting: Prompting) -> int:
        """Returns the number of worked examples that are shown."""
        if prompting.shots is None:
            return 0 if prompting.chat else self.shots
        return min(prompting.shots, self.shots)

    def describe(self, prompting: Prompting) -> str:
        """Returns a word or two on how its questions are asked."""
        shots = self.shots_of(prompting)
        return f"{f'{shots}-shot' if shots else 'zero-shot'}{', chat' if prompting.chat else ''}"


def format_of(columns: Columns) -> SuiteFormat | None:
    """Returns the format with these columns, or None.

    >>> found = format_of({"question": "1 + 1?", "answer": "#### 2"})
    >>> found and found.name
    'gsm8k'
    """
    return next((one for one in FORMATS if one.columns.keys() <= columns.keys()), None)


def _ask_gsm8k(columns: Columns, prompting: Prompting) -> str:
    question, count = columns["question"], GSM8K.shots_of(prompting)
    if not count and prompting.chat:
        return f"{question}\n\nThink step by step. End with a line of #### and the number alone."
    shots = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in GSM8K_SHOTS[:count])
    return f"{shots}Question: {question}\nAnswer:"


def _judge_gsm8k(columns: Columns, completions: Sequence[str]) -> list[float | None]:
    right = hashed(columns["answer"]) or ""
    return [float(same_number(hashed(text) or last_boxed(text) or "", right)) for text in completions]


def _fault_gsm8k(columns: Columns) -> str | None:
    return None if hashed(columns["answer"]) else "its answer has no #### with a number"


def _ask_math(columns: Columns, prompting: Prompting) -> str:
    problem, count = columns["problem"], MATH.shots_of(prompting)
    if not count and prompting.chat:
        return f"{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    shots = "".join(f"Problem:\n{asked}\n\nSolution:\n{answer}\n\n" for asked, answer in MATH_SHOTS[:count])
    return f"{shots}Problem:\n{problem}\n\nSolution:"


def _judge_math(columns: Columns, completions: Sequence[str]) -> list[float | None]:
    right = _right_math(columns) or ""
    boxes = map(last_boxed, completions)
    return [float(box is not None and same_math(box, right)) for box in boxes]


def _right_math(columns: Columns) -> str | None:
    """Returns the right answer of a row: a column in MATH-500, else the box in its solution."""
    answer = columns.get("answer")
    return answer if isinstance(answer, str) else last_boxed(columns["solution"])


def _fault_math(columns: Columns) -> str | None:
    return None if _right_math(columns) else "its solution has no \\boxed answer"


def _ask_ifeval(columns: Columns, prompting: Prompting) -> str:
    return columns["prompt"]


def _judge_ifeval(columns: Columns, completions: Sequence[str]) -> list[float | None]:
    if unknown_instruction(columns):
        return [None] * len(completions)
    return [float(follows_all(text, columns)) for text in completions]


def _ask_humaneval(columns: Columns, prompting: Prompting) -> str:
    if not prompting.chat:
        return columns["prompt"]
    fenced = f"```python\n{columns['prompt'].rstrip()}\n```"
    return f"Complete this function. Answer with one block of Python code that has all of it.\n\n{fenced}"


def _judge_humaneval(columns: Columns, completions: Sequence[str]) -> list[float | None]:
    # Every answer is a stranger's program: without a sandbox this raises SandboxError.
    count = len(completions)
    shares = passes_tests(
        [columns["prompt"]] * count,
        [_body(text) for text in completions],
        test=[columns["test"]] * count,
        entry_point=[columns["entry_point"]] * count,
    )
    return [None if share is None else float(share == 1.0) for share in shares]


_BEHIND_BODY = re.compile(r"\n(?=class |def |#|if |print\(|```)")


def _body(text: str) -> str:
    """Returns a text that continues a function, up to where the function ends; any other text as it is."""
    return _BEHIND_BODY.split(text, maxsplit=1)[0] if text.startswith((" ", "\t")) else text


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text up to the first of these stop strings.

    >>> before_stop("#### 4\\n\\nQuestion: 3 + 3?", GSM8K.stops)
    '#### 4\\n'
    """
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]


GSM8K = SuiteFormat(
    "gsm8k",
    {"question": str, "answer": str},
    _ask_gsm8k,
    _judge_gsm8k,
    _fault_gsm8k,
    shots=len(GSM8K_SHOTS),
    stops=("\nQuestion:",),
)
MATH = SuiteFormat(
    "math",
    {"problem": str, "solution": str},
    _ask_math,
    _judge_math,
    _fault_math,
    shots=len(MATH_SHOTS),
    stops=("\nProblem:",),
)
IFEVAL = SuiteFormat(
    "ifeval",
    {"prompt": str, "instruction_id_list": list, "kwargs": list},
    _ask_ifeval,
    _judge_ifeval,
    fault_of_instructions,
    unknown_instruction,
)
HUMANEVAL = SuiteFormat(
    "humaneval",
    {"prompt": str, "entry_point": str, "test": str},
    _ask_humaneval,
    _judge_humaneval,
)

FORMATS = (GSM8K, MATH, IFEVAL, HUMANEVAL)
"""Formats that `format_of` knows, in order: the first that fits is taken."""
