"""The endpoints over loopback, asked by OpenAI's own client."""

import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import openai
import pytest

from swarmnode.extensions.serve.answering_service import MOST_OF_A_CALLER
from swarmnode.extensions.serve.questions import Question
from swarmnode.rollout.engine import Output, PolicyUpdate
from swarmnode.testing.fake_engine import FakeEngine
from tests.served import Served, endpoints, says, served
from tests.unit.rollout.test_shared_engine import until

KEY = "correct horse"


@pytest.fixture(scope="module")
def at() -> Iterator[Served]:
    with served(says("hello END", max_length=2000)) as running:
        running.policy.set_policy(PolicyUpdate(12, {}, 1.0))
        yield running


@pytest.fixture(scope="module")
def url(at: Served) -> Iterator[str]:
    with endpoints(at.path) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as found:
        yield found


def send(
    url: str, method: str, path: str, body: str = "", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=30)
    connection.request(method, path, body or None, {name.replace("_", "-"): v for name, v in headers.items()})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_openais_client_lists_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["policy", "policy@12", "policy@0", "base"]
    assert client.models.retrieve("policy@12").id == "policy@12"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_openais_client_gets_a_chat_completion_and_the_version_that_wrote_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], logprobs=True, stop=["END"], n=2
    )
    parsed = answer.parse()
    assert answer.headers["X-Swarmnode-Model"] == parsed.model == "policy@12"
    assert [choice.message.content for choice in parsed.choices] == ["hello "] * 2
    assert [choice.finish_reason for choice in parsed.choices] == ["stop"] * 2
    assert parsed.usage is not None and parsed.usage.prompt_tokens == 2
    [first, *_] = parsed.choices
    assert first.logprobs is not None and first.logprobs.content is not None
    assert first.logprobs.content[0].token == "h" and first.logprobs.content[0].logprob == -0.5


def test_openais_client_streams_with_usage_at_the_end(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert (said, {chunk.model for chunk in chunks}) == ("hello END", {"base"})
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_openais_client_gets_a_completion_with_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="policy@0", prompt="hi", max_tokens=3, logprobs=0, extra_body={"return_token_ids": True}
    )
    [choice] = answer.choices
    assert (answer.model, choice.text, choice.finish_reason) == ("policy@0", "hel", "length")
    assert choice.model_extra == {"token_ids": [104, 101, 108]}
    assert choice.logprobs is not None and choice.logprobs.tokens == ["h", "e", "l"]
    assert answer.model_extra == {"prompt_token_ids": [104, 105]}
    pieces = list(client.completions.create(model="policy", prompt="hi", stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == "hello END"


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4") as unknown:
        client.completions.create(model="gpt-4", prompt="hi")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="policy", prompt="a" * 5000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")


def test_control_characters_are_text(client: openai.OpenAI) -> None:
    said = "\x1b[2J\x00\u202e</script>"
    with served(says(said)) as at, endpoints(at.path) as url:
        there = openai.OpenAI(base_url=url, api_key="any")
        answer = there.chat.completions.create(model="policy", messages=[{"role": "user", "content": said}])
        _, headers, _ = send(url, "GET", "/v1/models/" + "%1b%5b2J")
    assert answer.choices[0].message.content == said.replace("\x00", "")
    assert headers["content-type"] == "application/json"


def test_too_many_answers_are_refused_with_a_time_to_come_again() -> None:
    class Stuck(FakeEngine):
        def step(self) -> Sequence[Output]:
            return ()

    with served(Stuck(lambda request: (1,))) as at, endpoints(at.path) as url:
        for _ in range(MOST_OF_A_CALLER):
            at.service.ask(Question(text="a", caller="127.0.0.1"))
        body = json.dumps({"model": "policy", "prompt": "hi"})
        status, headers, content = send(url, "POST", "/v1/completions", body)
        assert (status, headers["retry-after"]) == (429, "2")
        assert json.loads(content)["error"]["code"] == "rate_limit_exceeded"


def test_who_leaves_before_the_answer_is_no_longer_answered() -> None:
    class Stuck(FakeEngine):
        def step(self) -> Sequence[Output]:
            return ()

    with served(Stuck(lambda request: (1,))) as at, endpoints(at.path) as url:
        where = urlsplit(url)
        for stream in (True, False):
            connection = http.client.HTTPConnection(str(where.hostname), where.port)
            body = json.dumps({"model": "policy", "prompt": "hi", "stream": stream})
            connection.request("POST", "/v1/completions", body)
            until(lambda: bool(at.service._samples))
            connection.close()
            until(lambda: not at.service._samples)


def test_without_a_node_the_endpoints_say_so() -> None:
    with endpoints(None) as url:
        status, headers, content = send(url, "GET", "/v1/models")
        assert (status, headers["retry-after"]) == (503, "2")
        assert "does not answer" in json.loads(content)["error"]["message"]
        assert send(url, "GET", "/healthz")[0] == 200
        body = json.dumps({"model": "policy", "prompt": "hi"})
        assert send(url, "POST", "/v1/completions", body)[0] == 503


def test_other_paths_and_methods_say_what_there_is(url: str) -> None:
    for method, path in (("GET", "/v1/embeddings"), ("GET", "/v1/completions"), ("DELETE", "/v1/models")):
        status, _, content = send(url, method, path)
        assert status == 404 and "/v1/chat/completions" in json.loads(content)["error"]["message"]


def test_a_body_that_is_too_long_is_refused(url: str) -> None:
    assert send(url, "POST", "/v1/completions", Content_Length="2000000")[0] == 413


@pytest.mark.parametrize("given", ["", "Bearer wrong", "Basic correct horse"])
def test_a_key_is_asked_for_where_there_is_one(given: str) -> None:
    with served(says("hello")) as at, endpoints(at.path, key=KEY) as url:
        status, _, content = send(url, "GET", "/v1/models", **({"Authorization": given} if given else {}))
        assert status == 401 and json.loads(content)["error"]["type"] == "authentication_error"
        with openai.OpenAI(base_url=url, api_key=KEY) as client:
            assert client.models.retrieve("policy").id == "policy"


def test_whoever_leaves_within_a_request_leaves_no_trace_in_the_log(
    url: str, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    where = urlsplit(url)
    with socket.create_connection((str(where.hostname), where.port or 0), timeout=30) as leaving:
        leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
        leaving.shutdown(socket.SHUT_WR)
        leaving.makefile("rb").read()
    client.models.list()
    assert not caplog.records
