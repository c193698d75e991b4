"""Tools and environments that people have, as tasks that answer back."""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import swarmnode as sn
from swarmnode.chat import Turn, messages_of, tools_of
from swarmnode.errors import JudgementLost, JudgementOverran, TaskError
from swarmnode.extensions.environments.conversation_scores import conversation
from swarmnode.extensions.environments.environment_task import OWN_REWARD
from swarmnode.extensions.environments.episodes import MAX_OBSERVED_CHARS, ToolEpisode, step_result, text_of
from swarmnode.extensions.environments.live_episodes import MAX_LIVE, MAX_WAIT_S, LiveEpisodes
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes.isolated_task import isolate
from swarmnode.tasks.source_file import load_source
from swarmnode.tasks.task import Environment, is_environment, judges_groups
from swarmnode.types import Example

EXAMPLES = Path(__file__).parents[4] / "examples"

TWO_TOOLS = '''
def add(left: int, right: int) -> int:
    """Adds two numbers.

    Args:
        left: The first.
        right: The second.
    """
    return left + right

def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: It.
    """
    if number > 99:
        raise ValueError("too large")
    return 2 * number

tools = [add, double]
exchangeable = True
most_turns = 4

def examples(seed):
    for number in range(seed, 100):
        yield {"prompt": f"{number} + 1, doubled?", "answer": str(2 * (number + 1))}

def reward(completions, answer, **columns):
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answer)]

def reward_calls(completions, **columns):
    return [float(sum(len(m.get("tool_calls", [])) for m in c)) for c in completions]
'''


def loaded(tmp_path: Path, source: str) -> Environment:
    file = tmp_path / "mine.py"
    file.write_text(source)
    task = load_task(str(file))
    assert is_environment(task)
    return task


def first(task: Environment) -> Example:
    return next(iter(task.examples(0)))


def play(task: Environment, example: Example, saids: Sequence[str]) -> tuple[Turn, ...]:
    """The turns of an episode in which this is said, up to its end."""
    turns: list[Turn] = []
    for said in saids:
        observed = task.observe(example, [*turns, Turn(said)])
        turns.append(Turn(said, observed or ()))
        if observed is None:
            break
    return tuple(turns)


def observed(turns: Sequence[Turn]) -> list[str]:
    return [message["content"] for turn in turns for message in turn.observed]


# ---- tools ----


def test_a_file_with_tools_is_an_environment(tmp_path: Path) -> None:
    task = loaded(tmp_path, TWO_TOOLS)
    example = first(task)
    assert [tool["function"]["name"] for tool in tools_of(example.prompt)] == ["add", "double"]
    assert messages_of(example.prompt) == [{"role": "user", "content": "0 + 1, doubled?"}]
    assert (task.most_turns, task.exchangeable, example.conversational) == (4, True, True)
    turns = play(task, example, ["add(0, 1)", "double: 1", "2"])
    assert turns[0].observed == ({"role": "tool", "content": "1"},)
    assert turns[2] == Turn("2")
    wrong = (Turn("3"),)
    assert task.score(example, [tuple(turns), tuple(wrong)]) == [
        {"reward": 1.0, "calls": 2.0},
        {"reward": 0.0, "calls": 0.0},
    ]


def test_its_version_is_no_plain_tasks(tmp_path: Path) -> None:
    with_tools = loaded(tmp_path, TWO_TOOLS).version
    (tmp_path / "mine.py").write_text(TWO_TOOLS.replace("tools =", "others ="))
    assert with_tools != load_task(str(tmp_path / "mine.py")).version


def test_what_goes_wrong_in_a_call_is_told_to_the_policy(tmp_path: Path) -> None:
    task = loaded(tmp_path, TWO_TOOLS)
    said = ["double(100)", 'double("1")', "<tool_call>{}</tool_call>", "add(1)"]
    assert observed(play(task, first(task), said)) == [
        "error: too large",
        "error: number must be integer",
        'error: a call is {"name": ..., "arguments": {...}}',
        "error: right is missing",
    ]


def test_without_a_reward_the_last_turn_is_compared_with_the_answer(tmp_path: Path) -> None:
    task = loaded(tmp_path, TWO_TOOLS.partition("def reward(")[0])
    example = first(task)
    right = play(task, example, ["add(0, 1)", " 2"])
    assert task.score(example, [tuple(right), "1"]) == [{"correct": 1.0}, {"correct": 0.0}]


def test_tools_stay_at_home_unless_they_say_otherwise(tmp_path: Path) -> None:
    assert not loaded(tmp_path, TWO_TOOLS.replace("exchangeable = True", "")).exchangeable


def test_rewards_that_compare_the_episodes_of_a_group_stay_at_home_and_say_so(tmp_path: Path) -> None:
    assert not judges_groups(loaded(tmp_path, TWO_TOOLS))
    task = loaded(tmp_path, f"{TWO_TOOLS}\nreward.of_group = True\n")
    assert judges_groups(task) and not task.exchangeable


def test_a_reward_gets_conversations_as_trl_has_them() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"left": 1, "right": 2}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    from swarmnode.chat import prompt_of
    from swarmnode.types import ExampleKey

    example = Example(ExampleKey("t", "1", 0, 0), prompt_of([{"role": "user", "content": "?"}], tools))
    turns = [Turn(f"So: {call}", ({"role": "tool", "content": "3"},)), Turn("3")]
    function = {"name": "add", "arguments": {"left": 1, "right": 2}}
    assert conversation(example, turns) == [
        {
            "role": "assistant",
            "content": "So:",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]


def shout(text: str) -> str:
    """Says it louder, often."""
    return text.upper() * 10_000


def test_a_long_answer_of_a_tool_is_cut() -> None:
    task = as_task([("Shout a.", "A")], tools=[shout])
    assert is_environment(task)
    (said,) = observed(play(task, first(task), ["shout: a"]))
    assert said == "A" * MAX_OBSERVED_CHARS + " ... (10000 characters)"


# ---- environments of TRL ----

HANGMAN = '''
class Hangman:
    """Guess a word, letter by letter."""

    exchangeable = True
    most_turns = 5

    def reset(self, word, **columns):
        self.word, self.found = word, set()
        return f" It has {len(word)} letters."

    def guess(self, letter: str) -> str:
        """Asks for a letter.

        Args:
            letter: The letter.
        """
        self.found.add(letter)
        return "".join(one if one in self.found else "_" for one in self.word)

    async def get_reward(self):
        return len(self.found & set(self.word)) / len(set(self.word))

    def _secret(self):
        return self.word

def examples(seed):
    for word in ("pea", "bean", "leek", "beet", "kale"):
        yield {"prompt": "Which plant is it?", "word": word}

environment_factory = Hangman
'''


def test_an_environment_factory_of_trl(tmp_path: Path) -> None:
    task = loaded(tmp_path, HANGMAN)
    example = first(task)
    assert messages_of(example.prompt)[-1]["content"] == "Which plant is it? It has 3 letters."
    assert [tool["function"]["name"] for tool in tools_of(example.prompt)] == ["guess"]
    turns = play(task, example, ["guess: p", "guess: a", "It is pea."])
    assert observed(turns) == ["p__", "p_a"]
    assert task.score(example, [tuple(turns)]) == [{OWN_REWARD: pytest.approx(2 / 3)}]


def test_two_episodes_of_one_example_do_not_touch(tmp_path: Path) -> None:
    task = loaded(tmp_path, HANGMAN.replace("exchangeable = True", ""))
    example = first(task)
    one = [Turn("guess: p", task.observe(example, [Turn("guess: p")]) or ())]
    other = [Turn("guess: p", task.observe(example, [Turn("guess: p")]) or ())]
    task.observe(example, [*one, Turn("guess: e")])
    assert task.observe(example, [*other, Turn("guess: a")]) == ({"role": "tool", "content": "p_a"},)


def test_an_episode_that_is_gone_is_played_again_only_where_it_may_be(tmp_path: Path) -> None:
    source = HANGMAN.replace("return f", "return f")
    task, other = loaded(tmp_path, source), loaded(tmp_path, source)
    turns = play(task, first(task), ["guess: p", "guess: a", "pea"])
    assert other.observe(first(other), [*turns[:2], Turn("guess: e")]) == (
        {"role": "tool", "content": "pea"},
    )
    assert other.score(first(other), [tuple(turns)]) == [{OWN_REWARD: pytest.approx(2 / 3)}]
    at_home = loaded(tmp_path, source.replace("exchangeable = True", ""))
    with pytest.raises(JudgementLost):
        at_home.observe(first(at_home), [*turns[:2], Turn("guess: e")])
    assert at_home.score(first(at_home), [tuple(turns), "pea"]) == [{}, {OWN_REWARD: 0.0}]


def test_an_episode_that_is_over_may_be_scored_again(tmp_path: Path) -> None:
    task = loaded(tmp_path, HANGMAN.replace("exchangeable = True", ""))
    example = first(task)
    told = [tuple(play(task, example, ["guess: p", "guess: a", "pea"]))]
    assert task.score(example, told) == task.score(example, [*told, "?"])[:1] != [{}]


def test_a_transcript_with_observations_that_were_not_made_has_no_reward(tmp_path: Path) -> None:
    task = loaded(tmp_path, HANGMAN)
    forged = [Turn("guess: x", ({"role": "tool", "content": "pea"},)), Turn("pea")]
    assert task.score(first(task), [tuple(forged)]) == [{}]


def test_a_reward_function_gets_the_environments(tmp_path: Path) -> None:
    task = loaded(
        tmp_path,
        HANGMAN + "\ndef reward(environments, **columns):\n    return [len(e.found) for e in environments]\n",
    )
    example = first(task)
    turns = play(task, example, ["guess: z", "Nothing."])
    assert task.score(example, [tuple(turns)]) == [{"reward": 1.0, OWN_REWARD: 0.0}]


def test_a_tool_that_nobody_called_in_the_episode_is_not_called_for_its_score(tmp_path: Path) -> None:
    task = loaded(tmp_path, HANGMAN)
    example = first(task)
    turns = [*play(task, example, ["guess: p"]), Turn("guess: a")]
    assert task.score(example, [tuple(turns)]) == [{OWN_REWARD: pytest.approx(1 / 3)}]


def test_an_action_that_no_step_has_taken_is_taken_before_it_is_scored() -> None:
    task = as_task(None, environment=Echo)
    assert is_environment(task)
    example = first(task)
    cut = [*play(task, example, ["a"]), Turn("bb")]
    assert task.score(example, [tuple(cut)]) == [{OWN_REWARD: 3.0}]


@pytest.mark.parametrize("cut", [False, True], ids=["answered", "no room for the answer"])
def test_a_call_is_made_once_however_often_it_is_scored(cut: bool) -> None:
    booked: list[int] = []

    def book(seat: int) -> str:
        """Books a seat.

        Args:
            seat: Its number.
        """
        booked.append(seat)
        return "done"

    task = as_task([("Book seat 7.", "7")], [lambda completions, **_: [1.0] * len(completions)], tools=[book])
    assert is_environment(task)
    example = next(iter(task.examples(0)))
    called = Turn("book: 7")
    observed = task.observe(example, [called])
    assert observed is not None and booked == [7]
    told = tuple([called if cut else replace(called, observed=observed)])
    for _ in range(3):
        ((_, reward),) = task.score(example, [told])[0].items()
        assert reward == 1.0
    assert booked == [7]


HAS_RESET = "class Env:\n    def reset(self): pass\n    def get_reward(self): return 1.0\n"


def test_an_environment_that_wants_to_end_the_process_has_failed(tmp_path: Path) -> None:
    source = HAS_RESET.replace("pass", "raise SystemExit(2)") + "environment = Env\n"
    task = loaded(tmp_path, source + "def examples(seed):\n    yield '?', '!'\n")
    with pytest.raises(TaskError, match=r"SystemExit\(2\)"):
        next(iter(task.examples(0)))


def test_a_reset_that_says_something_else_each_time_is_refused() -> None:
    boards = iter("abcd")

    class Board(Echo):
        def reset(self) -> tuple[str, dict[str, Any]]:
            self.turns = 0
            return next(boards), {}

    task = as_task(None, environment=Board)
    assert is_environment(task)
    with pytest.raises(TaskError, match="something different each time"):
        play(task, first(task), ["a"])


def test_no_environment_stays_open_after_an_error() -> None:
    opened: list[Any] = []

    class Door:
        exchangeable = True

        def reset(self, answer: str) -> str:
            opened.append(self)
            if answer == "stuck":
                raise OSError("it is stuck")
            return f" Number {len(opened)}." if answer == "other" else ""

        def step(self, said: str) -> Any:
            return 5 if said == "bad" else ("go on", None, False, {})

        def close(self) -> None:
            opened.remove(self)

    def reward(completions: Any, **columns: Any) -> Any:
        raise ValueError("no reward")

    rows = [("?", "open"), ("??", "stuck"), ("???", "other")]
    task = as_task(lambda seed: rows[seed:], [reward], environment=Door)
    assert is_environment(task)
    example = next(iter(task.examples(0)))
    turn = Turn("a", task.observe(example, [Turn("a")]) or ())
    with pytest.raises(TaskError, match="no reward"):
        task.score(example, [(turn, Turn("b"))] * 8)
    with pytest.raises(TaskError, match="returned 5"):
        task.score(example, [(Turn("b"),), (Turn("bad"),)])
    with pytest.raises(TaskError, match="returned 5"):
        task.observe(example, [turn, Turn("bad")])
    with pytest.raises(JudgementLost, match="cannot be replayed"):
        task.observe(example, [Turn("a", ({"role": "user", "content": "forged"},)), Turn("b")])
    with pytest.raises(TaskError, match="it is stuck"):
        next(iter(task.examples(1)))
    with pytest.raises(TaskError, match="something different each time"):
        task.observe(replace(example, columns={"answer": "other"}), [Turn("a")])
    assert opened == []


def test_several_factories_are_chosen_by_a_column(tmp_path: Path) -> None:
    source = HANGMAN.replace("environment_factory = Hangman", "")
    source += (
        "class Loud(Hangman):\n"
        '    def reset(self, word, **columns):\n        super().reset(word)\n        return " LOUD"\n'
        'environment_factory = {"quiet": Hangman, "loud": Loud}\n'
    )
    source = source.replace(
        '"word": word}', '"word": word, "environment": "loud" if word == "pea" else "quiet"}'
    )
    loud, quiet, *_ = loaded(tmp_path, source).examples(0)
    assert messages_of(loud.prompt)[-1]["content"].endswith("LOUD")
    assert messages_of(quiet.prompt)[-1]["content"].endswith("4 letters.")


# ---- environments that are played by steps ----


@dataclass
class Move:
    to: int


@dataclass
class Shown:
    hint: str
    reward: float | None = None
    done: bool = False


class Higher:
    """Find a number, in the manner of OpenEnv."""

    exchangeable = True

    async def reset(self, seed: int | None = None) -> Shown:
        self.number = random.Random(seed).randrange(8)
        return Shown("A number below 8?")

    async def step(self, action: Move) -> Shown:
        if action.to == 99:
            raise ValueError("99 is forbidden")
        right = action.to == self.number
        return Shown("higher" if action.to < self.number else "lower", 1.0 if right else -0.125, right)


class Echo:
    """In the manner of Gymnasium, without a promise."""

    def reset(self) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return "Say three things.", {}

    def step(self, said: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return said, float(len(said)), False, self.turns == 3, {}


def test_an_environment_of_openenv_brings_its_own_questions() -> None:
    task = as_task(None, environment=Higher)
    assert is_environment(task)
    example = first(task)
    assert messages_of(example.prompt) == [{"role": "user", "content": "A number below 8?"}]
    number = random.Random(example.columns["seed"]).randrange(8)
    moves = ['{"to": 9}', "no", '{"to": 99}', f'{{"to": {number}}}']
    turns = play(task, example, moves)
    assert observed(turns)[0] == "lower"
    assert "error" in observed(turns)[1]
    assert observed(turns)[2] == "error: 99 is forbidden"
    assert turns[-1].observed == ()
    assert task.score(example, [tuple(turns)])[0][OWN_REWARD] == pytest.approx(1.0 - 0.125 * 1)


def test_a_step_that_raises_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where it does each time nothing is ever rewarded, and only the policy would know why."""

    class Strict(Higher):
        pass

    task = as_task(None, environment=Strict)
    for _ in range(2):
        play(task, first(task), ['{"to": 99}'])
    (told,) = (line for line in caplog.messages if "step() of Strict raised" in line)
    assert "99 is forbidden" in told and "test_environment_task.py line" in told


def test_one_that_is_installed_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import random\nclass Coin:\n    def reset(self, seed):\n        return f'Toss {seed}.', {}\n"
    source += "    def step(self, said):\n        return '', float(said == 'heads'), True, {}\n"
    (tmp_path / "coins.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    task = load_task("coins:Coin")
    assert is_environment(task)
    example = first(task)
    assert example.prompt == f"Toss {example.columns['seed']}."
    assert task.score(example, [tuple(play(task, example, ["heads"]))]) == [{OWN_REWARD: 1.0}]


def test_an_environment_of_gymnasium() -> None:
    task = as_task(None, environment=Echo)
    assert is_environment(task)
    assert not task.exchangeable
    example = first(task)
    turns = play(task, example, ["a", "bb", "ccc", "dddd"])
    assert observed(turns) == ["a", "bb"]
    assert len(turns) == 3
    assert task.score(example, [tuple(turns)]) == [{OWN_REWARD: 6.0}]


class LikeNumpys:
    """A number or a truth value that is none of Python's, as those of numpy are."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("result", "known"),
    [
        (("x", LikeNumpys(0.5), LikeNumpys(True), {}), ("x", 0.5, True)),
        (("x", LikeNumpys(2), LikeNumpys(False), False, {}), ("x", 2.0, False)),
        (("x", 1, False, LikeNumpys(True), {}), ("x", 1.0, True)),
    ],
)
def test_numbers_of_a_step_may_be_numpys(result: Any, known: Any) -> None:
    assert step_result(result) == known


@pytest.mark.parametrize(
    "result", [("x", "1", True, {}), ("x", 1.0, "no", {}), ("x", 1.0, LikeNumpys([True]), {}), ("x", 1.0, 3)]
)
def test_a_step_that_returns_something_else_is_refused(result: Any) -> None:
    with pytest.raises(TaskError, match=r"of the environment (returned|gave the reward)"):
        step_result(result)


class Late:
    def __init__(self, url: str) -> None:
        self.url = url


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        (None, {"environment": 3}, "3 does not make an environment. name the class"),
        (None, {"environment": Echo()}, "does not make an environment. name the class"),
        (None, {"environment": Late}, r"argument: .*url.*environment = lambda: Env\("),
        (None, {"environment": dict}, r"it has no reset\(\). write def reset"),
        ([("a", "b")], {"tools": []}, "there are 0 tools"),
        ([("a", "b")], {"tools": [len]}, "len has no|len cannot|of tool len"),
        (
            [("a", "b")],
            {"tools": print},
            "tools must be a list, got <built-in function print>",
        ),
    ],
)
def test_what_is_no_environment_is_refused(given: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        as_task(given, **options)


@pytest.mark.parametrize(
    ("assigned", "told"),
    [
        ("environment = object()", "<object object at .* does not make an environment. name the class"),
        ("environment_factory = 5", "5 does not make an environment. name the class"),
        ("tools = print", "tools must be a list, got <built-in function print>"),
    ],
)
def test_a_file_whose_environment_is_none_is_refused(tmp_path: Path, assigned: str, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        loaded(tmp_path, f"def examples(seed):\n    yield '?', '1'\n{assigned}")


def test_a_module_that_a_file_imports_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import json as tools\ndef examples(seed):\n    yield '?', '1'\n")
    assert not is_environment(load_task(str(tmp_path / "plain.py")))


class Guessing:
    """Has a tool."""

    def reset(self) -> None: ...

    def guess(self, letter: str) -> str:
        """Guesses a letter."""
        return "method"


def test_a_function_takes_the_place_of_no_method() -> None:
    def guess(letter: str) -> str:
        """Guesses a letter."""
        return "function"

    with pytest.raises(TaskError, match="two tools are called guess"):
        list(as_task(["?"], tools=[guess], environment=Guessing).examples(0))


def test_what_a_tool_returns_keeps_all_its_fields() -> None:
    told = {"reward": 3, "done": False, "metadata": {}, "none": None}
    assert text_of(told) == '{"reward": 3, "done": false, "metadata": {}, "none": null}'
    assert text_of({"note": "hi"}) == '{"note": "hi"}'


# ---- what is kept ----


def test_episodes_that_wait_are_bounded_in_number_and_age() -> None:
    now = [0.0]
    live = LiveEpisodes(clock=lambda: now[0])
    for number in range(MAX_LIVE + 3):
        live.put((number, b""), (), ToolEpisode({}))
    assert len(live) == MAX_LIVE
    assert live.take((0, b"")) is None
    now[0] = MAX_WAIT_S + 1
    live.put(("new", b""), (), ToolEpisode({}))
    assert len(live) == 1


def test_of_strangers_episodes_only_those_of_one_example_wait() -> None:
    closed: list[object] = []

    class Closing:
        def __init__(self, name: object) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    live = LiveEpisodes(of_one_example=True)
    for example, said in (("a", b"1"), ("a", b"2"), ("b", b"1")):
        live.put((example, said), (), ToolEpisode({}, Closing((example, said))))
    assert closed == [("a", b"1"), ("a", b"2")]
    assert len(live) == 1


# ---- a server of the model context protocol ----

# ---- in a process of its own ----


def test_a_file_is_played_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "hangman.py").write_text(HANGMAN)
    with ExitStack() as stack:
        task = stack.enter_context(isolated(tmp_path / "hangman.py"))
        example = first(task)
        assert (task.most_turns, task.exchangeable) == (5, True)
        turns = play(task, example, ["guess: p", "guess: a"])
        assert observed(turns) == ["p__", "p_a"]
        task.interrupt()  # The episode dies with its process, and is played again in the next one.
        turns += (Turn("guess: e", task.observe(example, [*turns, Turn("guess: e")]) or ()),)
        assert observed(turns)[-1] == "pea"
        assert task.score(example, [tuple(turns)]) == [{OWN_REWARD: 1.0}]


def test_an_episode_of_a_process_that_died_is_lost_where_it_cannot_be_played_again(tmp_path: Path) -> None:
    (tmp_path / "hangman.py").write_text(HANGMAN.replace("exchangeable = True", ""))
    with ExitStack() as stack:
        task = stack.enter_context(isolated(tmp_path / "hangman.py"))
        example = first(task)
        turns = play(task, example, ["guess: p"])
        task.interrupt()
        with pytest.raises(JudgementLost, match="is gone"):
            task.observe(example, [*turns, Turn("guess: a")])
        assert task.score(example, [tuple([*turns, Turn("pea")])]) == [{}]


def isolated(path: Path) -> Any:
    task = isolate(str(path), 60.0)
    assert is_environment(task)
    return task


def test_a_task_that_does_not_answer_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("def examples(seed):\n    yield 'a', 'b'\n")
    with isolate(str(tmp_path / "plain.py"), 60.0) as task:  # type: ignore[attr-defined]
        assert not is_environment(task)


# ---- objects of packages and of scripts ----


def test_a_class_of_a_module_is_an_environment_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "plants.py").write_text(HANGMAN.replace("environment_factory = Hangman", ""))
    task = load_task(f"{tmp_path / 'plants.py'}:Hangman")
    assert is_environment(task)
    assert task.name == "Hangman"
    assert messages_of(first(task).prompt)[-1]["content"].startswith("Which plant")


OBJECT = """
class Parrot:
    name, version, most_turns, exchangeable = "parrot", "1", 3, True

    def examples(self, seed):
        yield "Say it.", "it"

    def observe(self, example, turns):
        return None if len(turns) > 1 else ({"role": "user", "content": turns[-1].said},)

    def score(self, example, completions):
        return [{"length": float(len(text))} for text in completions]
"""


def test_an_object_that_observes_is_an_environment_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "parrot.py").write_text(OBJECT)
    task = load_task(f"{tmp_path / 'parrot.py'}:Parrot")
    assert is_environment(task)
    assert observed(play(task, first(task), ["it", "it"])) == ["it"]


def test_other_rewards_judge_the_conversation_of_an_environment() -> None:
    def turns_taken(completions: Sequence[Any], **columns: object) -> list[float]:
        return [float(sum(message["role"] == "assistant" for message in one)) for one in completions]

    task = as_task(as_task(None, environment=Echo), [turns_taken])
    assert is_environment(task)
    example = first(task)
    assert task.score(example, [tuple(play(task, example, ["a", "b", "c"]))]) == [{"turns_taken": 3.0}]


def test_a_node_takes_tools_and_environments(tmp_path: Path) -> None:
    with_tools = sn.Node([("Shout a.", "A")], tools=[shout], home=tmp_path)
    with_game = sn.Node(environment=Echo, home=tmp_path)
    assert [is_environment(node._task) for node in (with_tools, with_game)] == [True, True]
    with pytest.raises(TaskError, match="a named task"):
        sn.Node("rev", tools=[shout], home=tmp_path)


# ---- examples/ ----


@pytest.mark.parametrize(
    ("name", "options", "said", "answers", "score"),
    [
        (
            "two_tools",
            {"tools": ("add", "double")},
            ["add(0, 1)", "double: 1", "2"],
            ["1", "2"],
            {"correct": 1.0},
        ),
        ("environment", {"environment": "Guessing"}, ["guess: 9", "It is 9."], ["lower"], {OWN_REWARD: 0.0}),
        (
            "refine",
            {"environment": "Refining"},
            ["198", "a", "b", "They differ.", "198"],
            ["another way", "another way", "where do", "Now give"],
            {OWN_REWARD: 1.0},
        ),
    ],
)
def test_the_examples_play(
    name: str, options: dict[str, Any], said: list[str], answers: list[str], score: dict[str, float]
) -> None:
    module = vars(load_source(EXAMPLES / f"{name}.py").module)
    given = {
        key: [module[one] for one in names] if isinstance(names, tuple) else module[names]
        for key, names in options.items()
    }
    task = as_task(module["ROWS"][:2], **given)
    assert is_environment(task)
    example = next(one for one in task.examples(0) if one.columns.get("answer", "") in ("", "2", "198"))
    turns = play(task, example, said)
    assert all(part in text for part, text in zip(answers, observed(turns), strict=True))
    assert task.score(example, [tuple(turns)]) == [score]


def test_a_turn_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "stuck.py"
    path.write_text(HANGMAN.replace("self.found.add(letter)", "import time; time.sleep(3600)"))
    task: Any = isolate(str(path), 60.0, turn_timeout_s=0.2)
    with task, pytest.raises(JudgementOverran, match=r"did not return within 0\.2 s"):
        task.observe(first(task), [Turn("guess: p")])
