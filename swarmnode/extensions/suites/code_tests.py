"""The reward of code: the share of a function's tests that pass, run in the sandbox.

columns + completions -> [passes_tests] -> sandbox.run(judge, beside=candidate) -> a share per completion

The columns are those of the usual data sets: `test` and `entry_point` (HumanEval), `test_list`,
`test_imports` and `test_setup_code` (MBPP), or `tests`, a text or a list of them.

An answer and its tests are two processes (remote_calls.py), so that a function cannot decide that it has
passed. It gets and gives plain values: numbers, texts, lists, tuples, sets, dictionaries. Where a test needs
more of it than calls and attributes, the test fails.

Tests call the answer's functions by name. With an `entry_point` that is the only name that the answer gives
them; without, all that it defines, but no builtin, nothing that the tests import or define themselves, and no
module of the standard library: `math.isclose` in a test is Python's own.
"""

import ast
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from swarmnode.errors import TaskError
from swarmnode.extensions.sandbox.sandbox import Limits, run
from swarmnode.extensions.suites import remote_calls
from swarmnode.machine.hardware import memory_bytes
from swarmnode.tasks.deadlines.work_clock import clock_of_work
from swarmnode.tasks.judging.plain_rewards import final_answer

LIMITS = Limits(wall_s=6.0, cpu_s=2)
"""Limits of one answer with all of its tests. Short, since many answers may loop or sleep without end."""

SPARE_S = 0.5
"""Seconds kept back from a group's time: an answer that could run into them is not begun."""

AT_ONCE = 4
"""Most answers judged at the same time, on two cores as well: those that sleep need none."""

_FENCED = re.compile(
    r"^[ \t]*```[ \t]*(?:(?:[pP]ython3?|py)[ \t]*)?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE
)

READ_FORMS = (
    "write assertions, functions test_*, or check(candidate), called once or with the column entry_point"
)
"""Advice where tests have a form that is not read."""

Step = tuple[str, bool]
"""Statements of the tests, and whether they are one of the tests or only lead to some."""


def passes_tests(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]] | None = None,
    *,
    tests: list[Any] | None = None,
    test: list[Any] | None = None,
    test_list: list[Any] | None = None,
    test_imports: list[Any] | None = None,
    test_setup_code: list[str] | None = None,
    entry_point: Sequence[str | None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Returns the share of tests that the function in a completion passes. None: there are no tests, the
    function waited, or earlier answers took all the time.

    The function is the last block of code in the completion, or all of it, or what continues the prompt.
    """
    given = next((column for column in (tests, test, test_list) if column is not None), None)
    if given is None:
        raise TaskError("there are no tests", hint="add a column tests, test or test_list")
    count = len(completions)
    setups, names = test_setup_code or [""] * count, entry_point or [None] * count
    imports = test_imports or [()] * count
    clock = clock_of_work()

    def score(row: int) -> float | None:
        if clock.left_s < LIMITS.wall_s + SPARE_S:
            return None
        prompt, name = _asked(prompts[row]), names[row]
        given_imports = imports[row] or ()
        imported = [given_imports] if isinstance(given_imports, str) else given_imports
        leading = [*imported, helpers_of(prompt, name)]
        steps = [
            *(step for source in leading for step in _leading(source)),
            *steps_of(given[row], setups[row], name),
        ]
        return share_passed(code_of(final_answer(completions[row]), prompt, name), steps, name)

    with ThreadPoolExecutor(max_workers=at_once(memory_bytes()[1], LIMITS)) as threads:
        return list(threads.map(score, range(count)))


def at_once(free_bytes: int, limits: Limits) -> int:
    """Returns how many answers are judged at the same time. Several processes judge, for us and for
    strangers, and none knows of the others; but each sees what they have left of the machine, and takes half
    of that at most for the two programs of each of its answers, or judges one after the other.

    >>> at_once(64 << 30, Limits()), at_once(5 << 30, Limits()), at_once(0, Limits())
    (4, 2, 1)
    """
    return max(1, min(AT_ONCE, free_bytes // 2 // (2 * limits.memory_bytes)))


def share_passed(
    code: str,
    steps: Sequence[Step],
    entry_point: str | None = None,
    *,
    limits: Limits | None = None,
) -> float | None:
    """Returns the share of the tests among `steps` that code passes. Raises SandboxError.

    None: there is no test, or the clock ran out and not the processor's time: then nobody knows whether the
    code waited or the machine was busy.

    >>> share_passed("def double(n): return 2 * n", [("assert double(2) == 4", True)])
    1.0
    """
    count = sum(is_test for _, is_test in steps)
    if count == 0:
        return None
    if not code.strip():
        return 0.0
    judge = f"{_source()}\njudge({list(steps)!r}, {entry_point!r})\n"
    candidate = f"{_source()}\nserve({code!r})\n"
    end = run(judge, beside=candidate, limits=limits or LIMITS)
    if end.ended_by == "wall":
        return None
    return end.stdout[:count].count("1") / count


def steps_of(tests: Any, setup: str = "", entry_point: str | None = None) -> list[Step]:
    """Returns the statements of tests in order; those that assert something, and functions test_*, are
    counted. The parameter of `check` is what its only call hands to it, else the entry point. Raises
    TaskError where that is nothing, or `check` takes more.

    >>> steps_of(["assert f(1) == 2", "assert f(2) == 3"])
    [('assert f(1) == 2', True), ('assert f(2) == 3', True)]
    >>> steps_of("def check(fn):\\n    n = 1\\n    assert fn(n) == 2\\ncheck(add)")
    [('fn = add', False), ('n = 1', False), ('assert fn(n) == 2', True)]
    """
    steps = _leading(f"candidate = {entry_point}" if entry_point else "") + _leading(setup)
    if not isinstance(tests, str):
        return [*steps, *((str(one), True) for one in tests or ())]
    nodes = _parsed(tests).body
    handed = {text for node in nodes for text in _handed_to_check(node) or ()}
    function = handed.pop() if len(handed) == 1 else entry_point
    return [*steps, *(step for node in nodes for step in _steps_of(node, function))]


def _parsed(tests: str) -> ast.Module:
    try:
        return ast.parse(tests)
    except SyntaxError as error:
        raise TaskError(f"the tests of an example are not valid Python: {error.msg}") from error


def _steps_of(node: ast.stmt, function: str | None) -> list[Step]:
    if isinstance(node, ast.FunctionDef) and node.name == "check":
        body = [step for inner in node.body for step in _steps_of(inner, function)]
        return [*_bound(node, function), *body]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        return [(ast.unparse(node), False), *([(f"{node.name}()", True)] if is_test else [])]
    if _handed_to_check(node) is not None:
        return []
    return [(ast.unparse(node), any(isinstance(inner, ast.Assert) for inner in ast.walk(node)))]


def _handed_to_check(node: ast.stmt) -> list[str] | None:
    """Returns what a call of `check` hands to it, if it is one thing. None: the statement is no such call."""
    match node:
        case ast.Expr(ast.Call(ast.Name("check")) as call):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            is_one = len(given) == 1 and not isinstance(given[0], ast.Starred)
            return [ast.unparse(given[0])] if is_one else []
        case _:
            return None


def _bound(check: ast.FunctionDef, function: str | None) -> list[Step]:
    """Returns what binds the parameters of `check`, whose body stands alone: the function, and defaults."""
    found = check.args
    positional = [one.arg for one in (*found.posonlyargs, *found.args)]
    defaults = dict(zip(reversed(positional), reversed(found.defaults), strict=False))
    for one, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        defaults |= {one.arg: default} if default is not None else {}
    names = [*positional, *(one.arg for one in found.kwonlyargs)]
    required = [name for name in names if name not in defaults]
    target = next(iter(required or names), None)
    written = f"check({ast.unparse(found)})"
    if len(required) > 1 or found.vararg is not None or found.kwarg is not None:
        raise TaskError(
            f"the tests of an example have {written}: check must take one function", hint=READ_FORMS
        )
    if target is not None and not function:
        raise TaskError(f"the tests of an example pass nothing to {written}", hint=READ_FORMS)
    others = [(f"{name} = {ast.unparse(value)}", False) for name, value in defaults.items() if name != target]
    return others if target is None else [(f"{target} = {function}", False), *others]


def _leading(source: str) -> list[Step]:
    return [(source, False)] if source and source.strip() else []


def helpers_of(prompt: str, entry_point: str | None) -> str:
    """Returns the definitions in a prompt of code besides `entry_point`. Tests may use them, and an answer
    may not replace them.

    >>> helpers_of("x = 1\\ndef g(): return x\\ndef f():", "f")
    'x = 1\\n\\ndef g():\\n    return x'
    """
    for text in (prompt, f"{prompt}\n    pass\n", f"{prompt} pass"):
        try:
            nodes = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        others = [node for node in nodes if getattr(node, "name", None) != entry_point]
        return ast.unparse(ast.Module(others, [])) if len(others) < len(nodes) else ""
    return ""


def code_of(completion: str, prompt: str, entry_point: str | None = None) -> str:
    """Returns the program that a completion means: its last block of code that defines the function, or all
    of it.

    Where it does not define the function and the prompt begins it, it follows the prompt; else it gets the
    prompt's imports and other definitions.

    >>> code_of("Here it is:\\n```python\\ndef f(): return 1\\n```\\nDone.", "Write f")
    'def f(): return 1\\n'
    >>> code_of("    return 1\\n", "def f():\\n", "f")
    'def f():\\n    return 1\\n'
    """
    blocks = _FENCED.findall(completion)
    defining = [block for block in blocks if _defines(block, entry_point)]
    code = (defining or blocks or [completion])[-1]
    if _defines(code, entry_point):
        if entry_point is None:
            return code
        imports = re.findall(r"^(?:from \w[\w.]* import [\w, ]+|import [\w., ]+)$", prompt, re.MULTILINE)
        return "\n".join([helpers_of(prompt, entry_point) or "\n".join(imports), code]).lstrip()
    return prompt + code if _defines(prompt, entry_point) else code


def _defines(code: str, name: str | None) -> bool:
    return name is None or bool(re.search(rf"^[ \t]*(?:async )?def {re.escape(name)}\b", code, re.MULTILINE))


def _asked(prompt: Any) -> str:
    """Returns a prompt as text, from a string or from messages."""
    return prompt if isinstance(prompt, str) else "".join(str(one.get("content") or "") for one in prompt)


@cache
def _source() -> str:
    """Returns the program text that runs first at both ends of the conversation."""
    return Path(remote_calls.__file__).read_text(encoding="utf-8")
