"""`swarmnode task check`: what it measures, and each thing that it must notice."""

import pytest

import swarmnode.extensions.workbench.check
from swarmnode.errors import JudgementOverran, TaskError
from swarmnode.extensions.workbench.check import INDIFFERENT, READS_NO_QUESTION, check_task
from swarmnode.settings.config import TasksConfig

GOOD = """
import random

def examples(seed):
    rng = random.Random(seed)
    for _ in range(1000):
        number = rng.randrange(10_000)
        yield f"{number} + 1 =", str(number + 1)
"""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """However busy this machine is, no task of these tests is too slow for it."""
    monkeypatch.setattr(swarmnode.extensions.workbench.check, "SLOW_DRAWS_PER_S", 0.0)
    monkeypatch.setattr(swarmnode.extensions.workbench.check, "SLOW_SCORES_PER_S", 0.0)


@pytest.fixture
def check(tmp_path):
    def check_source(source):
        path = tmp_path / "mine.py"
        path.write_text(source)
        return check_task(str(path))

    return check_source


def errors(report):
    return [f.what for f in report.findings if f.level == "error"]


def warnings(report):
    return [f.what for f in report.findings if f.level == "warning"]


@pytest.mark.parametrize("name", ["countdown", "sudoku"])
def test_the_puzzles_are_ready_to_train_on(name: str) -> None:
    report = check_task(name)
    assert report.ok
    assert report.lets_through is not None
    assert not any(report.lets_through.values())


def test_a_good_task_has_nothing_to_mend(check):
    report = check(GOOD)
    assert report.ok
    assert report.findings == ()
    assert report.drawn == 600
    assert report.distinct_share is not None
    assert report.distinct_share > 0.9
    assert report.held_out_share is not None
    assert 0.1 < report.held_out_share < 0.3
    assert report.draws_per_s is not None
    assert report.scores_per_s is not None
    assert report.sample is not None
    assert report.sample.columns["answer"]


def test_the_builtin_tasks_pass():
    assert check_task("rev").findings == ()


def test_draws_that_take_long_are_noticed(check, monkeypatch):
    monkeypatch.setattr(swarmnode.extensions.workbench.check, "SLOW_DRAWS_PER_S", 1e9)
    (told,) = warnings(check(GOOD))
    assert told.startswith("drawing takes") and told.endswith("ms per example")


def test_a_global_random_number_is_noticed(check):
    report = check(GOOD.replace("random.Random(seed)", "random.Random()"))
    assert errors(report) == ["two draws of the same seed differ"]


def test_seeding_the_global_random_is_fine(check):
    report = check(GOOD.replace("rng = random.Random(seed)", "random.seed(seed)").replace("rng.", "random."))
    assert report.findings == ()


def test_the_order_of_a_hash_is_noticed_although_one_process_agrees_with_itself(check):
    report = check(GOOD.replace("rng.randrange(10_000)", "hash(str(rng.random()))"))
    assert errors(report) == ["another process draws different examples"]


def test_a_column_that_is_no_data_is_named_and_not_blamed_on_chance(check):
    report = check(
        GOOD.replace("yield f", "yield {'prompt': f").replace(
            '=", str(number + 1)', """=", 'answer': str(number + 1), 'board': type('Board', (), {})()}"""
        )
    )
    assert errors(report) == []
    assert warnings(report) == [
        "the column 'board' is of type Board, which is not plain data:"
        " nodes cannot check that it stays the same"
    ]


def test_an_unstable_reward_is_noticed(check):
    source = "import itertools\nticks = itertools.count()\n"
    report = check(
        f"{source}{GOOD}\ndef reward(completions):\n    return [float(next(ticks)) for _ in completions]\n"
    )
    assert errors(report) == ["the same text scores differently the second time"]


COUNTS_CALLS = """
calls = 0

def reward(completions):
    global calls
    calls += 1
    return [calls % 2.0] * len(completions)
"""


def test_a_reward_that_counts_its_calls_is_noticed_although_it_repeats_itself(check):
    report = check(f"{GOOD}\n{COUNTS_CALLS}")
    assert errors(report) == ["the same text scores differently the second time"]


VOTE = """
from collections import Counter

def reward(completions):
    [(most, _)] = Counter(completions).most_common(1)
    return [float(completion == most) for completion in completions]
"""


def test_a_reward_that_compares_answers_is_told_of(check):
    report = check(f"{GOOD}\n{VOTE}")
    assert report.ok
    assert "an answer scores differently alone than beside others" in warnings(report)


def borrowed(name):
    return (
        f"{GOOD}\nfrom swarmnode.tasks.judging.rewards import load_reward\nreward = load_reward({name!r})\n"
    )


def test_what_a_judge_lets_through_is_said_in_plain_words(check):
    lax = check(borrowed("numeric_match"))
    assert lax.ok
    assert lax.lets_through == {
        "text before the answer": 1.0,
        "text behind it": 1.0,
        "text before and behind it": 1.0,
        "a false sum before it": 1.0,
    }
    assert warnings(lax) == ["right answers get full marks even with text added that nobody asked for"]


def test_a_right_answer_is_looked_for_in_the_forms_that_judges_want(check):
    boxed = check(borrowed("boxed_match")).lets_through
    assert boxed is not None and boxed["text before and behind it"] == 1.0


@pytest.mark.parametrize("name", ["exact_match", "strict_numeric_match", "strict_boxed_match"])
def test_a_strict_judge_lets_nothing_through(check, name):
    report = check(borrowed(name))
    assert report.lets_through is not None and set(report.lets_through.values()) == {0.0}
    assert "full marks" not in " ".join(warnings(report))


def test_an_answer_that_is_a_number_is_a_known_answer(check):
    numbers = """
def examples(seed):
    for number in range(seed, seed + 900):
        yield {"prompt": f"{number} + 1 =", "answer": number + 1}


def reward(completions, answer):
    return [float(text == str(right)) for text, right in zip(completions, answer)]
"""
    report = check(numbers)
    assert report.lets_through is not None and set(report.lets_through.values()) == {0.0}


def test_a_number_about_a_whole_group_that_a_reward_logs_compares_no_answers(check):
    logged = "log_metric('mean', sum(map(len, completions)) / len(completions))"
    judged = "[float(text == right) for text, right in zip(completions, answer)]"
    report = check(
        f"{GOOD}\ndef reward(completions, answer, log_metric):\n    {logged}\n    return {judged}\n"
    )
    assert not any("alone" in warning for warning in warnings(report))


def test_without_a_right_answer_nobody_knows_what_is_let_through(check):
    report = check(f"{GOOD}\ndef reward(completions):\n    return [0.0] * len(completions)\n")
    assert report.lets_through is None


def test_half_a_character_in_a_prompt_is_a_clear_error(check):
    report = check(GOOD.replace("{number} + 1 =", "{number} \\ud83d + 1 ="))
    (what,) = errors(report)
    assert "half a character" in what and "\\ud83d" in what
    assert report.drawn == 0


def test_a_reward_that_fails_is_an_error_with_a_hint(check):
    report = check(f"{GOOD}\ndef reward(completions):\n    return [1.0]\n")
    assert errors(report) == ["reward reward returned 1 values for 4 completions"]
    assert report.scores_per_s is None


def test_rewards_that_never_apply_and_rewards_that_never_differ_are_noticed(check):
    never = check(f"{GOOD}\ndef reward(completions):\n    return [None] * len(completions)\n")
    assert "no completion gets a reward, only None" in errors(never)
    same = check(f"{GOOD}\ndef reward(completions):\n    return [0.5] * len(completions)\n")
    assert warnings(same) == ["a right answer scores no better than nonsense"]
    assert same.ok


def test_a_task_without_known_answers_is_not_blamed_for_scoring_nonsense_alike(check):
    report = check(
        "def examples(seed):\n    return [f'a poem about {seed + i}' for i in range(300)]\n\n"
        "def reward(completions):\n    return [0.0] * len(completions)\n"
    )
    assert report.findings == ()


def test_examples_that_fail_are_an_error_and_what_was_drawn_is_still_counted(check):
    report = check(f"{GOOD}        if seed == 1: raise OSError('no such file')\n")
    assert len(errors(report)) == 1
    assert "examples(1) failed" in errors(report)[0]
    assert report.drawn == 201


def test_an_empty_task_is_an_error_and_nothing_is_made_up(check):
    report = check("def examples(seed):\n    return []\n")
    assert not report.ok
    assert (report.distinct_share, report.held_out_share, report.draws_per_s, report.scores_per_s) == (
        None,
    ) * 4
    assert report.sample is None


def test_few_questions_over_and_over_are_noticed(check):
    report = check(
        "def examples(seed):\n    return [(f'{i % 9} + 1 =', str(i % 9 + 1)) for i in range(300)]\n"
    )
    assert any("duplicates" in what for what in warnings(report))
    assert any("two seeds begin" in what for what in warnings(report))


def test_a_small_set_that_every_seed_reads_again_repeats_nothing(check):
    report = check(
        "import random\ndef examples(seed):\n"
        "    rows = [(f'{i} + 1 =', str(i + 1)) for i in range(100)]\n"
        "    random.Random(seed).shuffle(rows)\n    return rows\n"
    )
    assert (report.rows, report.drawn, report.distinct_share) == (100, 300, 1.0)
    assert not any("duplicates" in what for what in warnings(report))


def test_a_task_that_cannot_be_loaded_is_no_report(check):
    with pytest.raises(TaskError, match="syntax error"):
        check("def examples(seed)")


HANGS_FOR_S = 8.0
"""The limit where something hangs for ever. A process that starts on a busy machine has it too."""
HANGS = "    import re\n    return [float(bool(re.match(r'(a+)+$', 'a' * 40 + 'b')))]\n"


def test_a_reward_that_hangs_is_a_verdict_which_names_function_and_example(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"{GOOD}\ndef reward_form(completions):\n{HANGS}")
    report = check_task(str(path), TasksConfig(score_timeout_s=HANGS_FOR_S))
    assert not report.ok
    (finding,) = report.findings
    assert report.sample is not None
    where = f"the reward of task mine on example {report.sample.prompt!r}"
    assert finding.what == f"{where} did not return within {HANGS_FOR_S:g} s"
    assert finding.advice == f"it was at {path} line 12, in reward_form"
    assert (report.drawn, report.scores_per_s) == (600, None)


def test_examples_that_hang_are_a_verdict_too(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"{GOOD}        if seed == 1:\n            while True: pass\n")
    report = check_task(str(path), TasksConfig(score_timeout_s=HANGS_FOR_S))
    assert errors(report) == [f"examples(1) of task mine did not return within {HANGS_FOR_S:g} s"]
    assert report.drawn == 200


def test_a_file_that_hangs_while_it_is_loaded_is_a_clear_error(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("while True: pass\n")
    with pytest.raises(JudgementOverran, match="did not load"):
        check_task(str(path), TasksConfig(score_timeout_s=0.5))


DIGITS = (
    GOOD
    + """

def reward(completions, answer, **columns):
    return [float(text.strip().isdigit()) for text in completions]
"""
)

CONSTANT = (
    GOOD
    + """

def reward(completions, **columns):
    return [1.0 for text in completions]
"""
)


def test_a_reward_that_never_looks_at_the_question_is_told(check):
    report = check(DIGITS)
    assert READS_NO_QUESTION in warnings(report) and not report.teaches
    assert READS_NO_QUESTION not in warnings(check(GOOD)) and check(GOOD).teaches


def test_a_reward_that_is_always_the_same_teaches_nothing(check):
    report = check(CONSTANT)
    assert INDIFFERENT in warnings(report) and not report.teaches


SHOWN = """
def examples(seed):
    for number in range(seed, seed + 900):
        yield {"prompt": f"say {number}=", "answer": str(number), COLUMN: SHOWN}

def reward(completions, answer, **columns):
    return [float(text == f"it is {right}") for text, right in zip(completions, answer)]
"""


def shown(column, text):
    return SHOWN.replace("COLUMN", repr(column)).replace("SHOWN", text)


def test_right_demonstrations_are_right_answers(check):
    report = check(shown("demonstration", '[f"it is {number}"]'))
    assert report.teaches and report.findings == ()
    assert report.demonstrations is not None
    assert report.demonstrations.judged == report.demonstrations.right > 0
    assert report.lets_through is not None and set(report.lets_through.values()) == {0.0}


def test_demonstrations_without_full_marks_are_counted_and_one_is_told(check):
    none = check(shown("demonstration", '"nope"'))
    (what,) = [what for what in warnings(none) if "demonstrations" in what]
    assert what.startswith("32 of 32 demonstrations do not get full marks")
    assert "'nope' to 'say " in what and what.endswith("gets the reward 0")
    assert none.ok and not none.teaches
    half = check(shown("demonstration", '["nope", f"it is {number}"]'))
    assert half.teaches
    assert [what[:8] for what in warnings(half)] == ["32 of 64"]


def test_what_is_no_demonstration_is_an_error(check):
    (what,) = errors(check(shown("demonstration", "3")))
    assert "the demonstration of 'say" in what


@pytest.mark.parametrize("column", ["demonstrations", "Demonstration", "demonstation"])
def test_a_column_that_is_nearly_called_demonstration_is_named(check, column):
    assert f"the column {column!r} is not read as demonstrations" in warnings(check(shown(column, "'x'")))
    assert not any("column" in what for what in warnings(check(shown("explanation", "'x'"))))
