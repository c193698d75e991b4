"""`swarmnode --help` answers at once: nothing heavy is loaded to print a page of text."""

import json
import resource
import subprocess
import sys

HEAVY = ("torch", "transformers", "peft", "vllm", "libp2p", "hivemind", "numpy", "pydantic", "cryptography")

PROBE = """
import json, sys
from typer.testing import CliRunner
from swarmnode.cli.app import app
result = CliRunner().invoke(app, ["--help"])
print(json.dumps({"code": result.exit_code, "text": result.output, "modules": sorted(sys.modules)}))
"""

ONE_COMMAND = """
import json, sys
from typer.testing import CliRunner
from swarmnode.cli.app import app
result = CliRunner().invoke(app, ["config", "show", "--help"])
loaded = [name for name in sys.modules if name.startswith("swarmnode.cli.")]
print(json.dumps({"code": result.exit_code, "modules": sorted(loaded)}))
"""


def test_help_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["code"] == 0
    assert "join" in answer["text"]
    assert [name for name in HEAVY if name in answer["modules"]] == []


def test_a_command_loads_no_other_command() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_COMMAND], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["code"] == 0
    assert answer["modules"] == [
        "swarmnode.cli.app",
        "swarmnode.cli.output",
        "swarmnode.cli.settings",
    ]


def test_help_takes_less_than_half_a_cpu_second() -> None:
    """CPU time, not wall time, and the best of three: the machine may be busy."""
    assert min(cpu_seconds([sys.executable, "-m", "swarmnode", "--help"]) for _ in range(3)) < 0.5


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
