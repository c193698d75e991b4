"""The page of all settings is made, and is as they are."""

from pathlib import Path

from swarmnode.extensions.settings_help.settings_page import reference_page
from swarmnode.settings.config import KEYS


def test_the_page_of_settings_is_what_the_code_says() -> None:
    page = (Path(__file__).parents[4] / "docs" / "settings.md").read_text()
    assert page == reference_page(), "make it again: swarmnode config reference > docs/settings.md"
    assert all(f"`{key}`" in page for key in KEYS)
