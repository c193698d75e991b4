"""What is read of a machine: processes that are there, and a driver's answers as they are printed."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from swarmnode.extensions.limits.machine_readings import (
    busy_processes,
    listed_programs,
    on_battery,
    read_machine,
)
from swarmnode.machine.hardware import ask_nvidia_smi, card_in_use
from swarmnode.settings.config import Config

PMON_580 = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1801     G      3      1      -      -      -      -    Xorg
    0       9120   C+G     41     12      -      -      -      -    firefox
    0       {pid}     C     97     60      -      -      -      -    blender
"""
PMON_470 = """\
# gpu        pid  type    sm   mem   enc   dec   command
# Idx          #   C/G     %     %     %     %   name
    0       5512     C    88    20     -     -   ./my renderer
    0          -     -     -     -     -     -   -
"""


class Driver:
    """Answers as nvidia-smi would, and remembers the questions."""

    def __init__(self, pmon: str = "", temperature: str = "") -> None:
        self._pmon, self._temperature = pmon, temperature
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, arguments: Sequence[str]) -> str:
        self.asked.append(tuple(arguments))
        return self._pmon if arguments[0] == "pmon" else self._temperature


def limited(**limits: object) -> Config:
    return Config.model_validate({"limits": limits})


def test_the_columns_of_each_driver_are_found_by_their_names() -> None:
    assert busy_processes(PMON_580.format(pid=77)) == {9120: "firefox", 77: "blender"}
    assert busy_processes(PMON_470) == {5512: "./my renderer"}


@pytest.mark.parametrize(
    "text", ["", "\n", "Not supported on this device", "# gpu pid\n0 1", "# gpu pid sm command\n0"]
)
def test_what_is_no_table_names_nobody(text: str) -> None:
    assert busy_processes(text) == {}


def test_a_stranger_on_the_card_is_named_and_we_are_not() -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        table = PMON_580.format(pid=os.getppid()) + PMON_470.partition("\n")[2].replace(
            "5512", str(os.getpid())
        )
        assert "blender" in (read_machine(limited(), "GPU-1", Driver(table)).card_users or ())
        ours = read_machine(limited(), "GPU-1", Driver(PMON_580.format(pid=stranger.pid))).card_users
        assert ours is not None and "blender" not in ours, "our own children are no strangers"
    finally:
        stranger.kill()
        stranger.wait()


def test_another_node_and_what_is_no_process_here_are_no_strangers() -> None:
    # Of somebody else: grandchildren whose parent is gone. The second one tells its pid.
    program = "sleep 600 >/dev/null 2>&1 & echo $$ $!; exec >/dev/null 2>&1; wait"
    started = subprocess.Popen(
        ["sh", "-c", 'sh -c "$1" swarmnode & exit', "", program], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    with started.stdout as stdout:
        family = [int(pid) for pid in stdout.readline().split()]
    started.wait()
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        for pid in (*family, gone.pid):
            users = read_machine(limited(), "GPU-1", Driver(PMON_580.format(pid=pid))).card_users
            assert users is not None and "blender" not in users
    finally:
        for pid in family:
            psutil.Process(pid).kill()


def test_the_card_in_use_is_asked_and_nothing_that_no_limit_needs() -> None:
    driver = Driver(temperature="83\n")
    seen = read_machine(limited(temperature=80), "GPU-1", driver)
    assert seen.temperature_c == 83.0 and seen.card_users is None, "this driver says nothing of processes"
    assert all(question[-1] == "--id=GPU-1" for question in driver.asked) and len(driver.asked) == 2
    driver = Driver(PMON_470)
    assert read_machine(limited(give_way=False), "GPU-1", driver).card_users is None
    assert read_machine(limited(), "", driver).card_users is None
    assert driver.asked == []


def test_a_run_that_somebody_waits_for_is_not_held_back_by_the_card_unless_it_is_set() -> None:
    short = Config.model_validate({"node": {"rounds": 3}})
    driver = Driver(PMON_470)
    assert read_machine(short, "GPU-1", driver).card_users is None and driver.asked == []
    asked_for = Config.model_validate({"node": {"rounds": 3}, "limits": {"give_way": True}})
    assert read_machine(asked_for, "GPU-1", driver).card_users is not None


@pytest.mark.parametrize("printed", ["", "[N/A]", "N/A\n83", "-3"])
def test_a_temperature_that_is_no_number_is_unknown(printed: str) -> None:
    assert read_machine(limited(temperature=80), "0", Driver(temperature=printed)).temperature_c is None


def test_a_listed_program_is_found_by_its_name(tmp_path: Path) -> None:
    assert read_machine(limited(programs=["a-renderer-of-mine"]), "").programs == ()
    assert listed_programs(limited(programs=[""]).limits, ["", "sh"]) == ()
    program = tmp_path / "a-renderer-of-mine"
    shutil.copy(shutil.which("sleep") or "", program)
    # Somebody else's: a grandchild whose parent is gone.
    started = subprocess.run(
        ["sh", "-c", f"{program} 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    try:
        assert read_machine(limited(programs=["A-Renderer-of-mine"]), "").programs == ("A-Renderer-of-mine",)
    finally:
        psutil.Process(int(started.stdout)).kill()


def test_a_machine_without_a_card_or_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert ask_nvidia_smi(("pmon",)) == "" and card_in_use("auto") == ""
    assert on_battery() in (None, True, False)
