"""The page of three nodes that train on each other's groups, as chromium shows it: light, dark, on a phone.

`make page-check` does the same for eyes, and keeps the pictures.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.joined_node import JoinedNode
from tests.test_docker import module

page_check = module(Path(__file__).parents[2] / "checks/page_check.py")

ROUNDS = 10
"""So many points have its curves."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def test_the_page_of_three_nodes_has_no_error_all_controls_by_the_tab_key_and_no_line_too_wide(
    join: Callable[..., JoinedNode], tiny_model: Path, tmp_path: Path
) -> None:
    chromium = page_check.find_chromium()
    if chromium is None:
        pytest.skip(page_check.NO_CHROMIUM)
    nodes = [join(home="node-0", model=tiny_model)]
    address = nodes[0].running().addresses[0]
    nodes += [
        join(address, "--seed", str(number), home=f"node-{number}", model=tiny_model) for number in (1, 2)
    ]
    for node in nodes:
        node.until_round(ROUNDS)
    url = f"http://127.0.0.1:{nodes[1].running().http_port}/"
    with page_check.Browser(chromium) as browser:
        assert list(page_check.faults(browser, url, tmp_path, None)) == []
    pictures = {path.stem: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert sorted(pictures) == ["dark", "dark-whole", "light", "light-whole", "phone", "phone-whole"]
    assert len(set(pictures.values())) == len(pictures)
