"""Who may ask the page: rebinding, other sites, missing tokens, passwords and long requests."""

from base64 import b64encode

import pytest
from starlette.datastructures import Headers

from swarmnode.errors import ConfigError
from swarmnode.extensions.page.access import MOST_BODY_BYTES, TOKEN_HEADER, AccessGuard
from swarmnode.settings.config_layers import load_config

TOKEN, PASSWORD = "the token of this start", "correct horse"
HERE = {"Host": "127.0.0.1:8080"}


async def nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody is let through here")


def refused(
    *more: tuple[str, str],
    method: str = "GET",
    path: str = "/state",
    bound: str = "127.0.0.1",
    password: str = "",
) -> int | None:
    headers = Headers(raw=[(k.lower().encode(), v.encode("latin-1")) for k, v in [*HERE.items(), *more]])
    guard = AccessGuard(nothing, bound=bound, own_name="otter", password=password, token=TOKEN)
    found = guard.refusal(headers, method, path)
    return None if found is None else found[0]


def basic(text: str) -> tuple[str, str]:
    return "Authorization", f"Basic {b64encode(text.encode()).decode()}"


def test_a_program_and_our_own_page_are_let_through() -> None:
    assert refused() is None
    assert refused(("Origin", "http://127.0.0.1:8080"), ("Sec-Fetch-Site", "same-origin")) is None


def test_a_second_host_is_one_too_many() -> None:
    assert refused(("Host", "evil.example")) == 421


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:9999",
        "http://127.0.0.1.evil.example:8080",
        "file://",
        "http://[",
        "",
    ],
)
def test_another_site_is_refused_whatever_it_asks_for(origin: str) -> None:
    for method, path in (("GET", "/state"), ("GET", "/"), ("POST", "/control"), ("GET", "/metrics")):
        assert refused(("Origin", origin), (TOKEN_HEADER, TOKEN), method=method, path=path) == 403


def test_another_site_may_link_to_the_page_and_not_show_it() -> None:
    link = ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate")
    assert refused(*link, ("Sec-Fetch-Dest", "document"), path="/") is None
    assert refused(*link, ("Sec-Fetch-Dest", "iframe"), path="/") == 403
    assert refused(*link, ("Sec-Fetch-Dest", "document"), path="/state") == 403
    assert refused(("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors"), path="/page.js") == 403


def test_what_changes_something_needs_the_token() -> None:
    post = {"method": "POST", "path": "/control"}
    assert refused(**post) == 403
    assert refused((TOKEN_HEADER, "guessed"), **post) == 403
    assert refused((TOKEN_HEADER, "\xff"), **post) == 403
    assert refused((TOKEN_HEADER, TOKEN), **post) is None
    assert refused((TOKEN_HEADER, TOKEN), method="DELETE", path="/control") == 405


def test_long_requests_are_refused_before_they_are_read() -> None:
    assert refused(("Content-Length", str(MOST_BODY_BYTES))) is None
    for length in (str(MOST_BODY_BYTES + 1), "-1", "1e3", "\xb2", "9" * 400):
        assert refused(("Content-Length", length)) == 413
    assert refused(("Transfer-Encoding", "chunked")) == 413


def test_a_page_with_a_password_answers_who_has_it() -> None:
    assert refused(password=PASSWORD) == 401
    assert refused(basic(f"anybody:{PASSWORD}"), password=PASSWORD) is None
    assert refused((TOKEN_HEADER, TOKEN), password=PASSWORD) is None
    for wrong in (
        basic("anybody:guessed"),
        basic(PASSWORD),
        ("Authorization", "Basic ~~"),
        ("Authorization", "Basic \xff"),
        ("Authorization", ""),
    ):
        assert refused(wrong, password=PASSWORD) == 401
    assert refused(path="/healthz", password=PASSWORD) is None


def test_a_password_does_not_stand_for_the_token() -> None:
    assert refused(basic(f"me:{PASSWORD}"), method="POST", path="/control", password=PASSWORD) == 403


def test_an_address_of_other_machines_without_a_password_is_refused_in_a_sentence() -> None:
    for address in ("0.0.0.0", "192.168.1.2", "::", "otter.local", ""):
        with pytest.raises(
            ConfigError, match=r"other machines can reach node\.http: set node\.http_password"
        ):
            load_config(environ={}, assignments=[f"node.http={address!r}"])
    loaded = load_config(
        environ={"SWARMNODE_NODE__HTTP_PASSWORD": PASSWORD}, assignments=["node.http=0.0.0.0"]
    )
    assert PASSWORD not in repr(loaded.config) and PASSWORD not in loaded.config.model_dump_json()


def test_a_short_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="at least 8 characters") as caught:
        load_config(environ={}, assignments=["node.http_password=abc"])
    assert "abc" not in str(caught.value)
