"""Parts by name: ours, by import path, and those that installed packages register."""

import doctest
import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarmnode import engine_record, registry
from swarmnode.cli import app as cli
from swarmnode.engine_record import EngineOptions
from swarmnode.errors import ConfigError, RequestTimeout
from swarmnode.node.showing.monitors import make_monitors
from swarmnode.registry import SEAMS, Kind, find, find_called, known, made, names
from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.settings.config_layers import load_config
from swarmnode.settings.other_names import other_names
from swarmnode.tasks.builtin import BUILTIN_TASKS, builtin_names, builtin_task
from swarmnode.tasks.judging.conventions import adapted
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.specs import parse_spec
from swarmnode.training.losses import GRPO, loss_of

PACKAGE = '''
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.training.losses import GRPO as mine

class Counts:
    def start(self, run): pass
    def log(self, event, round, values): pass
    def finish(self, summary): pass

def load(asked):
    return next(task for task in BUILTIN_TASKS if task.name == asked.name)

def greet():
    """Say hello."""
    print("hello")
'''

ENTRY_POINTS = """
[swarmnode.loss]
mine = registered_parts:mine
grpo = registered_parts:Counts
[swarmnode.monitor]
counts = registered_parts:Counts
[swarmnode.task]
ours = registered_parts:load
[swarmnode.command]
greet = registered_parts:greet
[swarmnode.engine]
gone = no_longer_here:ENGINE
[swarmnode.builtin]
rev = registered_parts:mine
gone = no_longer_here:TASK
[swarmnode.names]
gone = no_longer_here:NAMES
[swarmnode.convention]
gone = no_longer_here:CONVENTION
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package as pip does, but for the copying."""
    (tmp_path / "registered_parts.py").write_text(PACKAGE)
    about = tmp_path / "registered_parts-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: registered-parts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(registry).failed == doctest.testmod(engine_record).failed == 0


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, seam in SEAMS.items() for name in seam.ours]
)
def test_every_part_of_ours_is_where_the_table_says(kind: Kind, name: str) -> None:
    assert find(kind, name) is not None and known(kind, name) == name


@pytest.mark.usefixtures("installed")
def test_an_installed_package_registers_parts_by_name() -> None:
    config = load_config(environ={}, assignments=["training.loss=mine", "node.monitors=['counts']"]).config
    assert loss_of(config.training.loss) is GRPO
    assert type(make_monitors(config.node.monitors)[1]).__name__ == "Counts"
    assert (parse_spec("ours:rev?a=1").kind, str(parse_spec("ours:rev?a=1"))) == ("ours", "ours:rev?a=1")
    assert load_task("ours:rev") is load_task("rev")


@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_a_command() -> None:
    assert "greet" in CliRunner().invoke(cli.app, ["--help"]).output
    assert CliRunner().invoke(cli.app, ["greet"]).output == "hello\n"


@pytest.mark.usefixtures("installed")
def test_a_name_of_ours_is_always_ours() -> None:
    assert find("loss", "grpo") is GRPO and names("loss").count("grpo") == 1
    assert builtin_task("rev") is BUILTIN_TASKS[0] and builtin_names().count("rev") == 1


@pytest.mark.usefixtures("installed")
def test_a_package_that_is_broken_breaks_nothing_but_what_asks_for_it(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    other_names.cache_clear()
    request.addfinalizer(other_names.cache_clear)
    assert load_task("rev") is BUILTIN_TASKS[0]
    with pytest.raises(ConfigError, match="'gone' cannot be imported"):
        load_task("gone")
    with pytest.raises(ConfigError, match=r"unknown setting 'training\.los'.*training\.loss"):
        load_config(environ={}, assignments=["training.los=grpo"])
    assert adapted(called) is called
    with pytest.raises(ConfigError, match="'gone' cannot be imported"):
        adapted(called, "gone")
    assert caplog.text.count("No module named 'no_longer_here'") == 2


@pytest.mark.usefixtures("installed")
def test_a_registered_part_that_cannot_be_imported_says_which_and_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine = 'gone' cannot .* install 'no_longer_here'"):
        find("engine", "gone")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import math\nloss = math.nothing\n", r"AttributeError\(.*see .*half_written.py line 2"),
        ("loss =\n", r"SyntaxError\(.*see .*half_written.py line 1"),
        ("import json\n\nloss = json.loads('x')\n", r"JSONDecodeError\(.*see .*half_written.py line 3"),
        ("raise SystemExit(3)\n", r"SystemExit\(3\)"),
    ],
)
def test_a_module_of_ones_own_that_fails_while_it_is_imported_is_told_with_its_line(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_written.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"training.loss = 'half_written:loss' cannot be imported: {told}"):
        find("loss", "half_written:loss")


def test_what_is_unknown_is_answered_with_all_that_is_known() -> None:
    with pytest.raises(ConfigError, match=r"no such rule; available: sapo, .*own_book\. .*swarmnode\.rule"):
        find("rule", "sopa")
    with pytest.raises(ConfigError, match=r"node.learner = 'x': no such learner; available: local\."):
        load_config(environ={}, assignments=["node.learner=x"])


@pytest.mark.parametrize("name", ["echo_engine.py:ECHO", "/tmp/some where/echo_engine.py:ECHO"])
def test_a_file_is_answered_with_the_name_of_its_module(name: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine = .*: write echo_engine:ECHO, and .* PYTHONPATH"):
        load_config(environ={}, assignments=[f"rollout.engine={name}"])


NUMBER = 3


def called(a: int, *, b: int) -> None: ...


def called_with_more(*arguments: int, **options: int) -> None: ...


class Like:
    def __call__(self, a: int, *, b: int) -> None: ...


class Lidded:
    """Whoever opens it meets a lid."""

    async def __aenter__(self) -> None: ...

    def open(self) -> None: ...


def test_a_part_is_called_as_it_is_said_or_refused_with_how() -> None:
    for name in ("called", "called_with_more"):
        assert find_called("transport", f"{__name__}:{name}", Like.__call__) is globals()[name]
    how = rf"it must take the arguments of Like in {__name__}: \(a, b=\)"
    with pytest.raises(ConfigError, match=rf"NUMBER' is a int, which is not callable.*{how}"):
        find_called("transport", f"{__name__}:NUMBER", Like.__call__)
    with pytest.raises(ConfigError, match=rf"network.transport = .* unexpected keyword argument 'b'.*{how}"):
        find_called("transport", f"{__name__}:Lidded.open", Like.__call__)


def test_what_a_part_makes_has_all_that_it_should_or_is_refused_with_what_it_lacks() -> None:
    lidded = Lidded()
    assert made("page", "mine", lambda: lidded, Lidded) is lidded
    with pytest.raises(ConfigError, match=r"node.page = 'mine' made a object, which lacks: __aenter__, open"):
        made("page", "mine", object, Lidded)


def test_an_error_in_the_code_of_a_part_says_which_setting_named_it() -> None:
    def broken() -> None:
        raise KeyError("broker")

    with pytest.raises(KeyError) as raised:
        made("transport", "mine:Broken", broken, Lidded)
    assert raised.value.__notes__ == ["raised by network.transport = 'mine:Broken'"]


def test_the_page_on_extending_names_every_seam_and_its_examples_are_python() -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    for kind, seam in SEAMS.items():
        assert f"`swarmnode.{kind}`" in page and (f"`{seam.said_by}" in page), kind
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 6
    parts: dict[str, Any] = {"__name__": "mymodule"}
    for example in examples:
        code = compile(example, "docs/extending.md", "exec")
        if "import *" not in example:  # A suite of its own, for whoever wrote a host.
            exec(code, parts)
    engine = parts["ECHO"].make(EngineOptions(None, (0,), 8, 64, None, None, 0, 1, 2))
    assert engine.capabilities.name == "echo"
    prompt = tuple(range(1, 17))
    engine.submit([Request(f"{seed}", prompt, SamplingParams(20, seed=seed)) for seed in range(8)])
    answers = [output for _ in range(17) for output in engine.step()]
    assert len(answers) == 8 and len({answer.token_ids for answer in answers}) > 1
    for answer in answers:
        assert answer.token_ids == (*prompt[: len(answer.token_ids) - 1], 0) and answer.finish == "stop"
        *_, last = answer.logprobs
        assert last == (0.0 if len(answer.token_ids) == 17 else math.log(0.1))


async def test_the_host_of_the_page_on_extending_loses_every_tenth_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (example,) = re.findall(r"```python\n([^`]*class Lossy.*?)```", page, flags=re.DOTALL)
    parts: dict[str, Any] = {"__name__": "mymodule"}
    exec(compile(example, "docs/extending.md", "exec"), parts)
    caplog.set_level("INFO", "swarmnode.mymodule")
    host = parts["Lossy"](tmp_path / "key")
    assert [host.loses("news") for _ in range(20)] == [*[False] * 9, True] * 2
    assert caplog.messages == ["lost message 10, news", "lost message 20, news"]
    host.sent = 9
    with pytest.raises(RequestTimeout):
        await host.request("peer", "/swarmnode/test", b"", timeout_s=0.0, max_response_bytes=9)
