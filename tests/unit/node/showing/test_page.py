"""A node with a page and one without."""

from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import ConfigError
from swarmnode.node.showing.page import NoPage, open_page
from tests.shown_page import STATUS, page_source

SOURCE = page_source(lambda: STATUS)


def test_a_node_may_have_no_page() -> None:
    with open_page(page_source(lambda: STATUS, node={"page": "off"})) as page:
        assert (page.port, page.address) == (0, "")


def test_a_page_of_ones_own_is_called_with_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "from contextlib import nullcontext\ndef show(source):\n    return nullcontext(source)\n"
    (tmp_path / "my_page.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = page_source(lambda: STATUS, node={"page": "my_page:show"})
    with open_page(source) as page:
        assert page is source
    missing = replace(source, config=page_source(lambda: STATUS, node={"page": "my_page:missing"}).config)
    with pytest.raises(ConfigError, match=r"node\.page = 'my_page:missing' cannot be imported"):
        open_page(missing)


def test_our_own_page_is_the_usual_one() -> None:
    with open_page(SOURCE) as page:
        assert page.address == f"http://127.0.0.1:{page.port}/" and len(page.token) > 20
    assert NoPage().token == ""
