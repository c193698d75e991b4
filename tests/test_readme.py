"""What the README promises can be typed."""

import re
from pathlib import Path

from benchmarks.house_counts import count_words
from swarmnode.extensions.workbench.check import check_task
from swarmnode.tasks.loader import load_task

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def task_of_the_readme() -> tuple[str, str]:
    found = re.search(r"```python\n# (\w+\.py)\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def test_the_custom_task_is_ready_to_train_on(tmp_path: Path) -> None:
    name, code = task_of_the_readme()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    path = tmp_path / name
    path.write_text(code)
    assert f"--task {name}" in README and f"task check {name}" in README
    assert check_task(str(path)).ok
    example = next(iter(load_task(str(path)).examples(0)))
    right, wrong = load_task(str(path)).score(example, [str(example.columns["answer"]), "?"])
    assert (right, wrong) == ({"reward": 1.0}, {"reward": 0.0})


def test_it_is_read_in_five_minutes() -> None:
    assert count_words(README) <= 1000


def test_its_targets_are_those_of_the_makefile() -> None:
    named = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert named >= {"join", "test"}
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_the_container_it_starts_is_one_that_the_dockerfile_makes() -> None:
    found = re.search(r"docker build -f (\S+) --target (\w+) .* -v \w+:(\S+) -p \d+:(\d+) ", README)
    assert found is not None
    dockerfile, target, volume, port = found.groups()
    text = (ROOT / dockerfile).read_text()
    assert re.search(rf"^FROM .* AS {target}$", text, re.MULTILINE)
    assert f"VOLUME {volume}\n" in text and f"EXPOSE {port}\n" in text


def test_the_table_has_ten_rows_at_most_and_each_says_what_prints_it() -> None:
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", README, re.MULTILINE)[1:]
    assert 5 <= len(rows) <= 10
    assert [row for row in rows if not re.fullmatch(r"\[(\w+\.py)\]\(benchmarks/\1\)", row)] == []
