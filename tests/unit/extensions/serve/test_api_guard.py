"""Who may ask: not the page of another site, not by another name, not without the key."""

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers

from swarmnode.extensions.serve.api_guard import ApiGuard

HERE = {"host": "127.0.0.1:8000"}


def status(key: str = "", bound: str = "127.0.0.1", path: str = "/v1/completions", **headers: str) -> int:
    guard = ApiGuard(Starlette(), bound=bound, own_name="otter", key=key)
    given = {name.replace("_", "-"): value for name, value in {**HERE, **headers}.items()}
    found = guard.refusal(Headers(given), "POST", path)
    return 200 if found is None else found.status


def test_programs_of_this_machine_may_ask() -> None:
    assert status() == status(host="localhost:8000") == 200
    assert status(origin="http://127.0.0.1:8000") == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.0.2.7", ""])
def test_a_name_that_was_pointed_at_us_is_refused(host: str) -> None:
    assert status(host=host) == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:9000"},
        {"sec_fetch_site": "cross-site"},
    ],
    ids=str,
)
def test_the_page_of_another_site_is_refused(headers: dict[str, str]) -> None:
    assert status(**headers) == 403


def test_other_machines_bring_the_key() -> None:
    known = {"bound": "0.0.0.0", "key": "correct horse", "host": "192.0.2.7:8000"}
    assert status(**known) == 401
    assert status(**known, authorization="Bearer wrong") == 401
    assert status(**known, authorization="Bearer correct horse") == 200
    assert status(**known, path="/healthz") == 200


@pytest.mark.parametrize("length", ["2000000", "-1", "1e3", "99999999999", "x"])
def test_a_length_that_is_too_much_or_none_is_refused_unread(length: str) -> None:
    assert status(content_length=length) == 413
