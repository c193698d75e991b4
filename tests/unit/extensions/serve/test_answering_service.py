"""The service: who is answered, by which version, and who is sent away."""

import time
from collections.abc import Iterable, Sequence

import pytest

from swarmnode.errors import EngineError
from swarmnode.extensions.serve.answering_service import (
    MOST_OF_A_CALLER,
    MOST_SAMPLES_WAITING,
    AnswerUnderWay,
)
from swarmnode.extensions.serve.questions import (
    AnswerBegan,
    AnswerEnded,
    Event,
    NoAnswer,
    Piece,
    Question,
    QuestionRefused,
)
from swarmnode.rollout.engine import Output, PolicyUpdate
from swarmnode.testing.fake_engine import FakeEngine
from tests.served import END, repeats, says, served

PATIENCE_S = 30.0


def all_of(answer: AnswerUnderWay) -> list[Event]:
    events: list[Event] = []
    left = answer.question.samples
    while left:
        events.append(answer.events.get(timeout=PATIENCE_S))
        left -= isinstance(events[-1], AnswerEnded | NoAnswer)
    return events


def text_of(events: Sequence[Event], sample: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece) and event.sample == sample)


def update(version: int) -> PolicyUpdate:
    return PolicyUpdate(version, {}, 1.0)


def refused(question: Question, **limits: int) -> NoAnswer:
    with served(says("yes", **limits)) as at, pytest.raises(QuestionRefused) as refusal:
        at.service.ask(question)
    return refusal.value.refused


def test_an_answer_comes_token_by_token_where_that_is_asked_for() -> None:
    with served(says("hello")) as at:
        streamed = all_of(at.service.ask(Question(text="hi", stream=True)))
        whole = all_of(at.service.ask(Question(text="hi")))
    assert text_of(streamed) == text_of(whole) == "hello"
    assert isinstance(streamed[0], AnswerBegan) and streamed[0].prompt_ids == (104, 105)
    assert sum(isinstance(event, Piece) for event in whole) == 1
    assert isinstance(whole[-1], AnswerEnded) and whole[-1].finish == "stop"
    [piece] = [event for event in whole if isinstance(event, Piece)]
    assert len(piece.tokens) == len(piece.token_ids) == len(piece.logprobs) == 6


def test_every_version_that_is_kept_can_be_named_and_says_its_name() -> None:
    with served(repeats()) as at:
        at.policy.set_policy(update(3))
        at.policy.set_policy(update(4))
        assert at.service.models().names == ("policy", "policy@4", "policy@3", "policy@0", "base")
        named = {
            model: all_of(at.service.ask(Question(model=model, text="a")))[0]
            for model in ("policy", "policy@3", "base")
        }
    assert {model: began.model for model, began in named.items() if isinstance(began, AnswerBegan)} == {
        "policy": "policy@4",
        "policy@3": "policy@3",
        "base": "base",
    }


@pytest.mark.parametrize(
    "model", ["gpt-4", "policy@7", "policy@00", "policy-1", "base@3", "policy@", "\x1b[2J", ""]
)
def test_an_unknown_model_is_refused_with_those_that_there_are(model: str) -> None:
    found = refused(Question(model=model, text="a"))
    assert (found.status, found.code, found.param) == (404, "model_not_found", "model")
    assert "policy@0" in found.message


def test_a_stop_text_ends_an_answer_and_its_request() -> None:
    with served(says("one END two")) as at:
        events = all_of(at.service.ask(Question(text="a", stop=("END",), max_tokens=16)))
        assert text_of(events) == "one "
        assert at.shared.rows == 0


def test_several_samples_have_seeds_of_their_own() -> None:
    with served(says("ab")) as at:
        events = all_of(at.service.ask(Question(text="a", samples=3, seed=5)))
    assert [text_of(events, sample) for sample in range(3)] == ["ab"] * 3


def test_too_much_is_refused_and_says_when_to_come_again() -> None:
    class Stuck(FakeEngine):
        def step(self) -> Sequence[Output]:
            return ()

    with served(Stuck(lambda request: (1,))) as at:
        for _ in range(MOST_OF_A_CALLER):
            mine = at.service.ask(Question(text="a", caller="me"))
        with pytest.raises(QuestionRefused, match="16 of your answers") as refusal:
            at.service.ask(Question(text="a", caller="me"))
        assert (refusal.value.refused.status, refusal.value.refused.retry_after_s) == (429, 2)
        for number in range(MOST_SAMPLES_WAITING - MOST_OF_A_CALLER):
            at.service.ask(Question(text="a", caller=f"other {number}"))
        with pytest.raises(QuestionRefused, match="at most 64 answers"):
            at.service.ask(Question(text="a", caller="one more"))
        at.service.cancel(mine)
        at.service.ask(Question(text="a", caller="me"))


@pytest.mark.parametrize(
    ("question", "code"),
    [
        (Question(text="a" * 60), "context_length_exceeded"),
        (Question(text="a" * 100_000), "context_length_exceeded"),
        (Question(token_ids=(1,) * 100_000), "context_length_exceeded"),
        (Question(text="a", max_tokens=64), "context_length_exceeded"),
        (Question(text=""), "invalid_value"),
        (Question(text="a", temperature=5.0), "invalid_value"),
        (Question(text="a", temperature=1e-9), "invalid_value"),
        (Question(text="a", top_p=0.0), "invalid_value"),
        (Question(token_ids=(1 << 40,)), "invalid_value"),
        (Question(messages=(("tool", "a"),)), "invalid_value"),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_refused_at_once(question: Question, code: str) -> None:
    found = refused(question, max_length=60)
    assert (found.status, found.code) == (400, code)


def test_an_engine_that_fails_tells_everybody_and_goes_on_later() -> None:
    class Breaks(FakeEngine):
        broken = True

        def step(self) -> Sequence[Output]:
            if self.broken and self.stats().waiting:
                self.abort()
                raise EngineError("the card is gone")
            return super().step()

    engine = Breaks(lambda request: (65, 0))
    with served(engine) as at:
        [_, found] = all_of(at.service.ask(Question(text="a")))
        assert isinstance(found, NoAnswer) and found.status == 503 and "the card is gone" in found.message
        engine.broken = False
        assert text_of(all_of(at.service.ask(Question(text="a")))) == "A"


@pytest.mark.parametrize("ending", ["at its stop text", "as nobody waits for it"])
def test_an_engine_that_fails_as_an_answer_is_taken_back_tells_the_others_and_goes_on(ending: str) -> None:
    class Breaks(FakeEngine):
        steps_left, broken = 3, False

        def step(self) -> Sequence[Output]:
            if self.steps_left == 0 or self.stats().running + self.stats().waiting < 2:
                return ()
            self.steps_left -= 1
            return super().step()

        def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
            if self.broken:
                raise EngineError("the card is gone")
            return super().abort(request_ids)

    engine = Breaks(lambda request: (*map(ord, "one END two"), END))
    with served(engine) as at:
        other = at.service.ask(Question(text="a"))
        taken_back = at.service.ask(Question(text="b", stop=("END",)))
        deadline = time.monotonic() + PATIENCE_S
        while engine.steps_left and time.monotonic() < deadline:
            time.sleep(0.01)
        engine.broken = True
        if ending == "at its stop text":
            engine.steps_left = 5
        else:
            at.service.cancel(taken_back)
        assert isinstance(all_of(other)[-1], NoAnswer)
        engine.broken, engine.steps_left = False, 100
        again = [at.service.ask(Question(text=text)) for text in "cd"]
        assert [text_of(all_of(answer)) for answer in again] == ["one END two"] * 2


def test_a_node_that_ends_says_so() -> None:
    class Stuck(FakeEngine):
        def step(self) -> Sequence[Output]:
            return ()

    with served(Stuck(lambda request: (1,))) as at:
        answer = at.service.ask(Question(text="a"))
    [_, found] = all_of(answer)
    assert isinstance(found, NoAnswer) and found.code == "shutting_down"
    with pytest.raises(QuestionRefused, match="ends"):
        at.service.ask(Question(text="a"))


def test_updates_between_questions_lose_none_of_them() -> None:
    with served(repeats()) as at:
        answers: list[AnswerUnderWay] = []
        for version in range(1, 13):
            answers.append(at.service.ask(Question(text="abcdefgh", max_tokens=9, stream=True)))
            at.policy.set_policy(update(version))
        found = [all_of(answer) for answer in answers]
    assert [text_of(events) for events in found] == ["abcdefgh"] * 12
    begun = [event.model for events in found for event in events if isinstance(event, AnswerBegan)]
    assert begun == [f"policy@{version}" for version in range(12)]
