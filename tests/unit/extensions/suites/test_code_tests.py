"""The share of a function's tests that pass: the usual data sets, and functions that would rather cheat."""

from contextvars import copy_context
from pathlib import Path

import pytest

from swarmnode.errors import TaskError
from swarmnode.extensions.sandbox import sandbox
from swarmnode.extensions.sandbox.sandbox import Limits, available
from swarmnode.extensions.suites import code_tests
from swarmnode.extensions.suites.code_tests import Step, code_of, passes_tests, share_passed, steps_of
from swarmnode.tasks.deadlines.work_clock import WorkClock, on_the_clock
from swarmnode.tasks.judging.rewards import call_reward, load_reward
from swarmnode.tasks.processes.isolated_task import isolate

needs_a_sandbox = pytest.mark.skipif(
    not available().confines, reason="this machine has nothing to make a sandbox of"
)

HUMAN_EVAL_PROMPT = '''from typing import List


def has_close(numbers: List[float], threshold: float) -> bool:
    """Whether two numbers are closer than the threshold.
    >>> has_close([1.0, 2.0], 0.5)
    False
    """
'''
HUMAN_EVAL_TEST = """

METADATA = {'author': 'us', 'dataset': 'test'}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.0], 0.5) == False
    for numbers in ([], [1.0]):
        assert candidate(numbers, 1.0) is False
    assert candidate([1.0, 1.0], 0.1), "equal ones are close"
"""
BODY = """    for i, one in enumerate(numbers):
        for other in numbers[i + 1:]:
            if abs(one - other) < threshold:
                return True
    return False
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine changes no result."""
    monkeypatch.setattr(code_tests, "LIMITS", Limits(wall_s=120.0, cpu_s=2))


def scored(*completions: str) -> list[float | None]:
    """HumanEval's columns, as a trainer hands them to a reward."""
    columns = {"test": [HUMAN_EVAL_TEST] * len(completions), "entry_point": ["has_close"] * len(completions)}
    return call_reward(
        load_reward("passes_tests"), [HUMAN_EVAL_PROMPT] * len(completions), completions, columns
    )


def share(code: str, *tests: str, name: str | None = None, limits: Limits | None = None) -> float | None:
    steps: list[Step] = [(test, True) for test in tests]
    return share_passed(code, steps, name, limits=limits or Limits(wall_s=120.0, cpu_s=1))


def test_no_answer_is_begun_that_the_time_of_its_group_may_not_suffice_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them waits for 6 s, of 15 that a stranger's group has."""
    now = [0.0]

    def waiting(*_: object) -> None:
        now[0] += 6.0

    monkeypatch.setattr(code_tests, "LIMITS", Limits(wall_s=6.0, cpu_s=2))
    monkeypatch.setattr(code_tests, "AT_ONCE", 1)
    monkeypatch.setattr(code_tests, "share_passed", waiting)

    def judged() -> list[float | None]:
        on_the_clock(WorkClock(15.0, lambda: now[0]))
        return passes_tests(["Write f"] * 16, ["f = 1"] * 16, test_list=[["assert f(1) == 1"]] * 16)

    assert copy_context().run(judged) == [None] * 16
    assert now[0] == 12.0


# ---- what is run ----


@needs_a_sandbox
def test_a_continuation_of_the_prompt_and_a_whole_function_are_both_answers() -> None:
    fenced = f"Compare all pairs.\n\n```python\n{HUMAN_EVAL_PROMPT}{BODY}```\nThat is quadratic."
    without_imports = f"```\ndef has_close(numbers: List[float], threshold: float):\n{BODY}```"
    assert scored(BODY, fenced, without_imports) == [1.0, 1.0, 1.0]


@needs_a_sandbox
def test_a_wrong_function_gets_the_share_that_it_has_right() -> None:
    assert scored("    return False", "    return None", "I do not know.", "") == [0.5, 0.0, 0.0, 0.0]


@needs_a_sandbox
def test_what_the_prompt_defines_besides_is_there_for_both_and_cannot_be_replaced() -> None:
    prompt = "def poly(xs, x):\n    return sum(c * x**n for n, c in enumerate(xs))\n\n\ndef find_zero(xs):\n"
    test = "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4"
    honest = "def find_zero(xs): return -xs[0] / xs[1] + 0 * poly(xs, 1)"
    forged = "def poly(*a): return 0\ndef find_zero(xs): return 7"
    answers = ["    return -xs[0] / xs[1]", honest, forged]
    assert passes_tests([prompt] * 3, answers, test=[test] * 3, entry_point=["find_zero"] * 3) == [1, 1, 0]


@needs_a_sandbox
def test_messages_are_answers_too() -> None:
    prompt = [[{"role": "user", "content": HUMAN_EVAL_PROMPT}]]
    answer = [[{"role": "assistant", "content": BODY}]]
    assert passes_tests(prompt, answer, test=[HUMAN_EVAL_TEST], entry_point=["has_close"]) == [1.0]


@needs_a_sandbox
def test_what_a_tool_or_a_user_says_is_no_answer_of_the_policy() -> None:
    """An environment that shows the solution, or a tool that echoes it, solves nothing."""
    shown = f"```python\n{HUMAN_EVAL_PROMPT}{BODY}```"
    for role in ("tool", "user"):
        told = [
            {"role": "assistant", "content": "show me"},
            {"role": role, "content": shown},
            {"role": "assistant", "content": "I do not know"},
        ]
        solved = [*told, {"role": "user", "content": "really?"}, {"role": "assistant", "content": shown}]
        columns = {"test": [HUMAN_EVAL_TEST] * 2, "entry_point": ["has_close"] * 2}
        assert passes_tests([HUMAN_EVAL_PROMPT] * 2, [told, solved], **columns) == [0.0, 1.0]


@needs_a_sandbox
def test_lists_of_assertions_are_run_as_mbpp_has_them() -> None:
    code = "```python\ndef total(shape): return shape.width * 2\n```"
    setup = "class Shape:\n    width = 4"
    tests = ["assert total(Shape()) == 8", "assert isinstance(8, int)"]
    assert passes_tests(["?"], [code], test_list=[tests], test_setup_code=[setup]) == [0.5]
    tests = ["assert set(similar((3, 4), (5, 4))) == set((4,))", "assert similar((1,), (2,)) == ()"]
    code = "def similar(a, b):\n    return tuple(set(a) & set(b))"
    assert passes_tests(["?"], [code], test_list=[tests], test_setup_code=[""]) == [1.0]


@needs_a_sandbox
def test_without_tests_it_does_not_apply() -> None:
    assert passes_tests(["?"] * 2, ["def f(): pass"] * 2, tests=[None, ""]) == [None] * 2
    with pytest.raises(TaskError, match="no tests"):
        passes_tests(["?"], ["def f(): pass"])
    with pytest.raises(TaskError, match="not valid Python"):
        passes_tests(["?"], ["def f(): pass"], tests=["assert ("])


def test_tests_are_split_into_what_is_counted_and_what_leads_there() -> None:
    steps = steps_of(HUMAN_EVAL_TEST, entry_point="has_close")
    assert [is_test for _, is_test in steps] == [False, False, False, True, True, True, True]
    assert steps_of("def test_one():\n    assert f() == 1\n\ncheck(f)") == [
        ("def test_one():\n    assert f() == 1", False),
        ("test_one()", True),
    ]
    assert steps_of(["assert f()"], "import math") == [("import math", False), ("assert f()", True)]


ADD = "def add(n): return n + 1"


@needs_a_sandbox
@pytest.mark.parametrize(
    ("test", "entry_point"),
    [
        ("def check(f):\n    assert f(1) == 2\n    assert f(2) == 4", "add"),
        ("def check(fn, /):\n    assert fn(1) == 2\n    assert fn(2) == 4\n\ncheck(add)", None),
        ("check(add)\ndef check(add):\n    assert add(1) == 2\n    assert add(2) == 4", "add"),
        (["assert candidate(1) == 2", "assert candidate(2) == 4"], "add"),
        ("def check():\n    assert add(1) == 2\n    assert add(2) == 4\n\ncheck()", None),
        ("def check(f, tol=1, *, n=2):\n    assert f(1) - n < tol\n    assert f(1) == 3\ncheck(f=add)", None),
        ("def check(f=None):\n    assert f(1) == 2\n    assert f(2) == 4\ncheck(add)\ncheck(sub)", "add"),
    ],
)
def test_check_gets_the_function_whatever_it_calls_it(test: object, entry_point: str | None) -> None:
    assert passes_tests(["?"], [ADD], test=[test], entry_point=[entry_point]) == [0.5]


@needs_a_sandbox
def test_check_gets_a_method_that_the_entry_point_is_a_path_to() -> None:
    code, test = f"class Solution:\n    @staticmethod\n    {ADD}", "def check(f):\n    assert f(1) == 2"
    assert passes_tests(["?"], [code], test=[test], entry_point=["Solution().add"]) == [1.0]


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("def check(f, g):\n    assert f(1) == 2\ncheck(add)", r"check\(f, g\): check must take one"),
        ("def check(*f):\n    assert f[0](1) == 2\ncheck(add)", r"check\(\*f\): check must take one"),
        ("def check(f):\n    assert f(1) == 2\ncheck(add)\ncheck(sub)", r"pass nothing to check\(f\)"),
        ("def check(f):\n    assert f(1) == 2\ncheck()", r"pass nothing to check\(f\)"),
        ("def check(f):\n    assert f(1) == 2\ncheck(*functions)", r"pass nothing to check\(f\)"),
    ],
)
def test_a_check_that_gets_no_single_function_is_an_error(test: str, reason: str) -> None:
    with pytest.raises(TaskError, match=reason) as raised:
        passes_tests(["?"], [ADD], test=[test])
    assert "check(candidate)" in raised.value.hint


def test_a_text_without_a_test_gives_no_reward() -> None:
    test = "def test(candidate):\n    assert candidate(1) == 2"
    assert passes_tests(["?"], [ADD], test=[test], entry_point=["add"]) == [None]


def test_a_long_line_of_spaces_costs_no_more_than_it_is_long() -> None:
    assert code_of("```" + " " * 200_000 + "x", "?", "f").startswith("```")


@pytest.mark.parametrize(
    ("completion", "prompt", "name", "code"),
    [
        ("def f(): return 1", "?", "f", "def f(): return 1"),
        ("```py\nx = 1\n```\nor\n```python\ndef f(): pass\n```", "?", "f", "def f(): pass\n"),
        ("```python\ndef f(): pass\n```\nuse:\n```python\nprint(f())\n```", "?", "f", "def f(): pass\n"),
        ("```python\ndef f(): pass\n```\nuse:\n```python\nprint(f())\n```", "?", None, "print(f())\n"),
        ("  return 1", "def f():\n", "f", "def f():\n  return 1"),
        ("async def f(): pass", "Use this:\nimport os\n", "f", "import os\nasync def f(): pass"),
        ("def f(): pass", "x = 1\ndef f():", "f", "x = 1\ndef f(): pass"),
    ],
)
def test_the_code_of_an_answer_is_found(completion: str, prompt: str, name: str | None, code: str) -> None:
    assert code_of(completion, prompt, name) == code


# ---- values between the two processes ----


@needs_a_sandbox
def test_every_plain_value_goes_there_and_back() -> None:
    numbers = "None, True, -(10**50), 0.1, float('inf'), 1j"
    values = f"({numbers}, b'x', '\\ud800\\n', [], {{1}}, frozenset({{2}}), {{'k': (1,)}})"
    assert share("def same(x): return x", f"x = {values}; assert repr(same(x)) == repr(x)") == 1.0
    assert share("def nan(): return float('nan')", "assert nan() != nan()") == 1.0


@needs_a_sandbox
def test_what_a_function_changes_in_place_is_changed() -> None:
    code = "def order(x): x.sort()\ndef fill(x): x['k'] = [1]\ndef empty(x): x.clear()"
    tests = ("x = [2, 1]; order(x); assert x == [1, 2]", "x = {}; fill(x); assert x == {'k': [1]}")
    assert share(code, *tests, "x = {1, 2}; empty(x); assert x == set()") == 1.0


@needs_a_sandbox
def test_objects_of_its_own_are_called_and_asked_for_attributes() -> None:
    code = (
        "class Stack:\n    size = 0\n    def __init__(self): self.items = []\n"
        "    def push(self, item): self.items.append(item); self.size += 1\n"
        "    def pop(self): return self.items.pop()\n"
        "def adder(n): return lambda m: n + m\n"
        "def squares(n):\n    for i in range(n): yield i * i\n"
        "def drained(stack): return stack.items\n"
    )
    assert (
        share(
            code,
            "s = Stack(); s.push(1); s.push('x'); assert s.pop() == 'x' and s.size == 2",
            "assert adder(2)(3) == 5",
            "assert list(squares(4)) == [0, 1, 4, 9]",
            "assert drained(s) == [1]",
            "try:\n    Stack().pop()\n    1 / 0\nexcept IndexError as e:\n    assert 'empty' in str(e)",
        )
        == 1.0
    )


# ---- functions that would rather cheat ----

FORGERIES = {
    "it ends the process in time": "import os, sys\nos._exit(0)",
    "it exits politely": "def f(*a): raise SystemExit(0)",
    "it says that it has passed": "import os\ndef f(*a): os.write(1, b'1' * 99); print('1' * 99)",
    "its answer equals everything": (
        "class All:\n    __eq__ = __ge__ = __le__ = lambda *a: True\n    __bool__ = lambda s: True\n"
        "    __hash__ = object.__hash__\ndef f(*a): return All()"
    ),
    "it is a number that equals everything": (
        "class All(int):\n    __eq__ = lambda *a: True\n    __hash__ = int.__hash__\ndef f(*a): return All()"
    ),
    "it redefines what tests use": (
        "def all(*a): return True\nisinstance = sorted = len = abs = all\ndef f(*a): return 0"
    ),
    "it patches builtins": "import builtins\nbuiltins.all = builtins.len = lambda *a: 7\ndef f(*a): return 0",
    "it ends every loop in silence": "def f(*a): raise StopIteration",
    "it ends where an error is expected": "import os\ndef f(*a): os._exit(1)",
    "it brings builtins of its own": "def __builtins__(*a): return 7\ndef f(*a): return 0",
    "it answers for itself": (
        "import os\nbody = b'[\"ready\", [\"f\"]]'\nos.write(3, len(body).to_bytes(4, 'big') + body)\n"
        "for _ in range(9):\n    body = b'[\"value\", true, []]'\n"
        "    os.write(3, len(body).to_bytes(4, 'big') + body)\nos.read(3, 1000)"
    ),
    "it sends nonsense": "import os\nos.write(3, b'\\x00\\x00\\x00\\x04nope' * 9)",
    "it sends without end": "import os\nwhile True: os.write(3, b'x' * 65536)",
    "it nests without end": (
        "import os\nbody = b'[\"ready\", [\"f\"]]'\nos.write(3, len(body).to_bytes(4, 'big') + body)\n"
        "body = b'[' * 500000\nos.write(3, len(body).to_bytes(4, 'big') + body)\nos.read(3, 1000)"
    ),
    "it loops": "def f(*a):\n    while True: pass",
    "it takes all memory": "def f(*a): return [0] * (1 << 40)",
    "it answers with more than there is": "def f(*a): return 'x' * (1 << 24)",
    "it returns an endless iterator": "import itertools\ndef f(*a): return itertools.count()",
    "it recurses": "def f(*a): return f(*a)",
    "it returns itself": "def f(*a):\n    x = []; x.append(x); return x",
}


@needs_a_sandbox
@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_passes_nothing(code: str) -> None:
    tests = (
        "assert f(1, 2) == 7",
        "assert all(x == 7 for x in [f(1, 2), f(0, 7)])",
        "assert len([f(1, 2)]) == 1 and sorted([f(1, 2), 8]) == [7, 8]",
        "assert all(map(lambda n: f(n, n) == 7, range(3)))",
        "try:\n    f('no number')\nexcept TypeError: pass\nelse: raise AssertionError",
    )
    assert share(code, *tests, name="f") == 0.0


VOLUME = "def volume(r):\n    return 4 / 3 * math.pi * r ** 3\n"
CLOSE = [
    "assert math.isclose(volume(10), 4188.79, rel_tol=0.001)",
    "assert math.isclose(volume(2), 33.51, rel_tol=0.001)",
]
FAKED = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef volume(r):\n    return 0\n"


@needs_a_sandbox
@pytest.mark.parametrize("imports", [None, ["import math"], "import math", []])
def test_a_module_that_tests_use_is_pythons_own(imports: object) -> None:
    """MBPP writes such tests; its sanitized half says in `test_imports` what they need."""
    columns = {"test_list": [CLOSE] * 4, **({} if imports is None else {"test_imports": [imports] * 4})}
    answers = [
        "import math\n" + VOLUME,
        "from math import pi\n" + VOLUME.replace("math.", ""),
        FAKED,
        FAKED + "import math",
    ]
    assert passes_tests(["Write volume"] * 4, answers, **columns) == [1.0, 1.0, 0.0, 0.0]


@needs_a_sandbox
@pytest.mark.parametrize(
    ("imports", "test", "fake"),
    [
        (["from math import isclose"], "assert isclose(f(2), 4)", "def isclose(*a): return True"),
        (["import math as m"], "assert m.isclose(f(2), 4)", "class m:\n    isclose = lambda *a: True"),
        (
            ["import no_such_module as np"],
            "assert np.close(f(2), 4)",
            "class np:\n    close = lambda *a: True",
        ),
        (
            ["import os.path"],
            "assert os.path.join(f(2)) == 4",
            "class os:\n    class path:\n        join = lambda a: 4",
        ),
        ([], "def same(a, b): return a == b\nassert same(f(2), 4)", "def same(*a): return True"),
        ([], "assert operator.eq(f(2), 4)", "class operator:\n    eq = lambda *a: True"),
    ],
)
def test_what_tests_compare_with_is_never_the_candidates(imports: list[str], test: str, fake: str) -> None:
    right = "def f(n): return 2 * n"
    answers = [f"{fake}\ndef f(n): return 0", f"{right}\n{fake}"]
    found = passes_tests(["Write f"] * 2, answers, tests=[test] * 2, test_imports=[imports] * 2)
    assert found == [0.0, 0.0 if "no_such" in str(imports) or "os.path" in str(imports) else 1.0]


@needs_a_sandbox
def test_where_the_function_is_named_nothing_else_is_taken_from_the_answer() -> None:
    test = "def check(candidate):\n    assert isclose(candidate(2), 4)"
    prompt = "from math import isclose\n\ndef f(n):\n"
    cheat = "```python\ndef isclose(*a): return True\ndef f(n): return 0\n```"
    for answer, share_of_it in (("    return 2 * n", 1.0), (cheat, 0.0)):
        assert passes_tests([prompt], [answer], test=[test], entry_point=["f"]) == [share_of_it]
    alone = passes_tests(["Write f"], [cheat], test=[test], entry_point=["f"])
    assert alone == [0.0]
    solution = "class Solution:\n    def double(self, n): return 2 * n"
    by_path = {"tests": [["assert Solution().double(2) == 4"]], "entry_point": ["Solution().double"]}
    assert passes_tests(["Write it"], [solution], **by_path) == [1.0]


@needs_a_sandbox
def test_functions_of_an_answer_may_be_called_like_what_a_module_has() -> None:
    code = "def gcd(a, b): return gcd(b, a % b) if b else a\ndef copy(x): return [*x]\nclass queue: pass\n"
    tests = ("assert gcd(12, 18) == 6", "assert copy([1]) == [1]")
    assert share(code, *tests, "queue = [copy([2])]; assert queue.pop() == [2]") == 1.0


@needs_a_sandbox
def test_a_function_that_searches_its_memory_finds_itself_and_no_tests() -> None:
    code = """
import gc, re, sys

def spy():
    'a text of its own'
    texts, frame = [], sys._getframe()
    while frame:
        texts += map(str, frame.f_locals.values())
        frame = frame.f_back
    for thing in gc.get_objects():
        texts += [str(one) for one in gc.get_referents(thing) if type(one) in (str, bytes)]
    everything = ' '.join(texts)
    return 'a text of its own' in everything, bool(re.search(r'assert spy[(]', everything))
"""
    assert share(code, "assert spy() == (True, False)", limits=Limits(wall_s=120.0, cpu_s=4)) == 1.0


@needs_a_sandbox
def test_tests_before_an_endless_loop_count() -> None:
    code = "def f(n):\n    while n > 1: pass\n    return n"
    tests = ("assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2", "assert f(0) == 0")
    assert share(code, *tests) == 0.5


@needs_a_sandbox
def test_an_answer_that_waits_until_its_time_is_up_has_no_reward() -> None:
    code = "import time\ndef f(): time.sleep(600)"
    assert share(code, "assert f() is None", limits=Limits(wall_s=0.5)) is None


# ---- in a task ----

TASK = """
from swarmnode.tasks.judging.rewards import load_reward

def examples(seed):
    yield {{"prompt": "Write double(n).", "tests": ["assert double(2) == 4", "assert double(-1) == -2"]}}

reward = load_reward("passes_tests")
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "doubling.py"
    path.write_text(TASK.replace("{{", "{").replace("}}", "}"))
    return path


@needs_a_sandbox
def test_a_task_judges_attacks_and_lives(task_file: Path) -> None:
    with isolate(str(task_file), 60.0) as task:
        example = next(iter(task.examples(1)))
        attacks = (
            "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef double(n): return 2 * n",
            "import os\nwhile True: os.fork()",
            "x = bytearray(1 << 40)",
            "open('/etc/passwd').read()\ndef double(n): return 2 * n",
            "def double(n): return 2 * n if n > 0 else 0",
            "def double(n): return n + n",
        )
        assert [score["reward"] for score in task.score(example, attacks)] == [0, 0, 0, 0, 0.5, 1]
        assert [score["reward"] for score in task.score(example, attacks[-1:])] == [1]


def test_a_reward_says_why_it_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "candidates", lambda: iter(()))
    monkeypatch.setattr(sandbox, "_found", [])
    with pytest.raises(TaskError, match="no sandbox to run strangers' programs in") as caught:
        call_reward(
            load_reward("passes_tests"), ["?"], ["def f(): pass"], {"tests": [["assert f() is None"]]}
        )
    assert "tasks.sandbox=optional" in caught.value.hint
