"""What OpenAI's clients may ask, and what they are told where it cannot be followed."""

import json

import pytest

from swarmnode.extensions.serve.openai_requests import read_chat, read_completion
from swarmnode.extensions.serve.questions import Question, QuestionRefused

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def chat(**more: object) -> bytes:
    return json.dumps({**CHAT, **more}).encode()


def completion(**more: object) -> bytes:
    return json.dumps({"model": "policy", "prompt": "hi", **more}).encode()


def test_a_chat_request_is_read_whole() -> None:
    asked = read_chat(
        chat(
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=9,
            temperature=0,
            top_p=0.5,
            n=2,
            stop="END",
            seed=4,
            logprobs=True,
            user="somebody",
        )
    )
    assert asked.question == Question(
        messages=(("user", "hi"),), max_tokens=9, temperature=0.0, top_p=0.5, samples=2,
        stop=("END",), seed=4, stream=True,
    )  # fmt: skip
    assert asked.chat and asked.logprobs and asked.include_usage


def test_a_message_may_come_in_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = read_chat(chat(messages=[{"role": "user", "content": parts}]))
    assert asked.question.messages == (("user", "ab"),)


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
def test_a_completion_is_of_a_text(prompt: object) -> None:
    assert read_completion(completion(prompt=prompt)).question.text == "hi"


def test_a_completion_may_be_of_token_ids() -> None:
    assert read_completion(completion(prompt=[1, 2])).question.token_ids == (1, 2)


def test_values_that_change_nothing_are_taken() -> None:
    read_chat(chat(presence_penalty=0, frequency_penalty=0.0, tools=[], logit_bias={}, n=1, top_logprobs=0))
    read_chat(chat(response_format={"type": "text"}, stop=None, store=False))
    read_completion(completion(best_of=1, echo=False, suffix="", logprobs=0))


def test_logprobs_of_tokens_that_were_not_sampled_are_refused_with_what_can_be_asked_for() -> None:
    with pytest.raises(QuestionRefused, match="logprobs=0") as refusal:
        read_completion(completion(logprobs=1))
    assert refusal.value.refused.param == "logprobs"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 99}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"stop": ""}, "stop"),
        ({"seed": 2**80}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}]}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_by_name(more: dict[str, object], param: str) -> None:
    with pytest.raises(QuestionRefused) as refusal:
        read_chat(chat(**more))
    assert (refusal.value.refused.status, refusal.value.refused.param) == (400, param)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": 1}', b"null"])
def test_nonsense_is_refused(content: bytes) -> None:
    with pytest.raises(QuestionRefused):
        read_chat(content)


@pytest.mark.parametrize("prompt", [["a", "b"], [], [1, "a"], 7, None, [[1]], [-1]])
def test_several_prompts_at_once_and_other_things_are_refused(prompt: object) -> None:
    with pytest.raises(QuestionRefused):
        read_completion(completion(prompt=prompt))
