"""Energy is added up from what the machine tells, and is unknown where it tells nothing."""

from pathlib import Path

import pytest

from swarmnode.extensions.contribution.power_meter import MOST_S, MOST_WATTS, PowerMeter, watts_in
from tests.unit.exchange.conftest import Clock


def zone(powercap: Path, number: str, microjoules: int, name: str = "package-0") -> Path:
    folder = powercap / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text("1000000000\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder


def test_processor_and_card_add_up(tmp_path: Path) -> None:
    clock = Clock(0.0)
    zone(tmp_path, "0", 5_000_000)
    meter = PowerMeter("GPU-1", powercap=tmp_path, watts_of=lambda card: 200.0, clock=clock)
    clock.advance(10)
    zone(tmp_path, "0", 505_000_000)
    assert meter.joules() == pytest.approx(500 + 2000)


def test_a_counter_that_begins_again_loses_nothing(tmp_path: Path) -> None:
    clock = Clock(0.0)
    zone(tmp_path, "0", 990_000_000)
    meter = PowerMeter(powercap=tmp_path, clock=clock)
    clock.advance(10)
    zone(tmp_path, "0", 20_000_000)
    assert meter.joules() == pytest.approx(30)


def test_parts_of_a_package_and_the_whole_platform_are_not_counted_again(tmp_path: Path) -> None:
    clock = Clock(0.0)
    for number, name in (("0", "package-0"), ("0:0", "core"), ("1", "psys")):
        zone(tmp_path, number, 0, name)
    meter = PowerMeter(powercap=tmp_path, clock=clock)
    clock.advance(1)
    for number, name in (("0", "package-0"), ("0:0", "core"), ("1", "psys")):
        zone(tmp_path, number, 10_000_000, name)
    assert meter.joules() == pytest.approx(10)


def test_a_machine_that_tells_nothing_has_an_unknown_energy_and_not_zero(tmp_path: Path) -> None:
    clock = Clock(0.0)
    unreadable = zone(tmp_path, "0", 0)
    (unreadable / "energy_uj").unlink()
    meter = PowerMeter("GPU-1", powercap=tmp_path, watts_of=lambda card: None, clock=clock)
    clock.advance(10)
    assert meter.joules() is None
    assert PowerMeter(powercap=tmp_path / "nothing").joules() is None


def test_what_cannot_be_is_left_out_and_a_sleep_is_not_counted(tmp_path: Path) -> None:
    clock = Clock(0.0)
    zone(tmp_path, "0", 0)
    meter = PowerMeter("GPU-1", powercap=tmp_path, watts_of=lambda card: 100.0, clock=clock)
    clock.advance(0.1)
    zone(tmp_path, "0", 999_000_000)
    assert meter.joules() == pytest.approx(10), "999 J in 0.1 s are no measurement"
    clock.advance(86_400)
    zone(tmp_path, "0", 999_000_000)
    assert meter.joules() == pytest.approx(100 * MOST_S)


@pytest.mark.parametrize("text", ["", "[N/A]", "nan", "-3", str(2 * MOST_WATTS), "71.3\n80.1"])
def test_what_is_no_power_of_one_card_is_unknown(text: str) -> None:
    assert watts_in(text) is None
