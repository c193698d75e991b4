"""The answering service of an engine: accepts people's questions, and streams answers token by token.

answering_socket.py (a thread for each who asks) -> [AnsweringService] -> shared_engine.py: a guest a policy

One thread drives the guests. While a round is generated, they share its steps; while the policy trains or
rests, the thread takes the steps itself. Nothing runs while there are no questions.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Self

from swarmnode.chat import ROLES, prompt_of
from swarmnode.errors import EngineError, ModelError, RequestRefused, SwarmnodeError
from swarmnode.extensions.serve.questions import (
    AnswerBegan,
    AnswerEnded,
    Event,
    Models,
    NoAnswer,
    Piece,
    Question,
    QuestionRefused,
)
from swarmnode.extensions.serve.text_stream import TextStream
from swarmnode.node.building.callers import CallerSource
from swarmnode.rollout.engine import BASE_VERSION, Request, Sampled, SamplingParams
from swarmnode.rollout.shared_engine import SharedGuest
from swarmnode.types import FinishReason

logger = logging.getLogger(__name__)

MOST_SAMPLES_WAITING = 64
"""Most answers that may be in progress or waiting. Further questions are refused for a while."""
MOST_OF_A_CALLER = 16
RETRY_AFTER_S = 2
MOST_CHARS_OF_A_TOKEN = 32
"""A prompt with more characters per token of room than this is refused before it is encoded."""
WHILE_ASLEEP_S = 0.05
ENGINE_TROUBLE = (SwarmnodeError, RuntimeError, MemoryError)
"""Errors that a step of an engine may raise. All that the guest had in flight is then lost."""
HOTTEST = 2.0


@dataclass(slots=True)
class _Sample:
    answer: "AnswerUnderWay"
    number: int
    text: TextStream
    tokens: int = 0
    """Number of its tokens that were passed on."""


@dataclass(eq=False)
class AnswerUnderWay:
    """One question in progress."""

    question: Question
    guest: SharedGuest
    events: "SimpleQueue[Event]" = field(default_factory=SimpleQueue)


class AnsweringService:
    """Answers questions with the policies of an engine, within its `with` block."""

    def __init__(self, source: CallerSource) -> None:
        self._source = source
        several = len(source.policies) > 1
        self._guests = {
            name if several else "policy": source.shared.guest(f"people of {name}", of=name)
            for name in source.policies
        }
        """The guests, by the names that people use for their policies."""
        self._samples: dict[str, _Sample] = {}
        """The unfinished samples, by the ids of their requests."""
        self._numbers = count()
        self._changed = threading.Condition()
        """Guards the two above. Notified when there is a new question."""
        self._closing = False
        self.used_s = 0.0
        """CPU time spent on passing answers on so far, without the engine."""
        self._thread = threading.Thread(target=self._work, name="service", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._give_up(None, NoAnswer(503, "this node ends", "shutting_down"))
        for guest in self._guests.values():
            guest.close()

    @property
    def gives_way(self) -> bool:
        """True while a policy trains and training has priority."""
        return self._source.shared.training_is_first

    def models(self) -> Models:
        """Returns the names of the models that can be asked now."""
        names = list(self._guests)
        for name, guest in self._guests.items():
            names += [f"{name}@{version}" for version in reversed(guest.versions)]
        return Models((*names, "base"))

    def ask(self, question: Question) -> AnswerUnderWay:
        """Accepts a question. Its events begin with `AnswerBegan`. Raises QuestionRefused."""
        guest, name, version = self._model(question.model)
        prompt_ids = self._prompt_ids(question, guest.capabilities.max_length)
        sampling = self._sampling(question, guest.capabilities.max_length - len(prompt_ids))
        answer = AnswerUnderWay(question, guest)
        with self._changed:
            waiting = sum(one.answer.question.caller == question.caller for one in self._samples.values())
            in_all = len(self._samples) + question.samples
            if self._closing:
                raise QuestionRefused(NoAnswer(503, "this node ends", "shutting_down"))
            if in_all > MOST_SAMPLES_WAITING or waiting + question.samples > MOST_OF_A_CALLER:
                raise QuestionRefused(_too_many(yours=in_all <= MOST_SAMPLES_WAITING))
            requests: list[Request] = []
            for number in range(question.samples):
                seed = None if question.seed is None else question.seed + number
                own = SamplingParams(sampling.max_tokens, sampling.temperature, sampling.top_p, seed=seed)
                # Callers with fewer answers in progress come first.
                requests.append(Request(f"{next(self._numbers)}", prompt_ids, own, version=version,
                                        priority=waiting + number))  # fmt: skip
            requests = self._submitted(guest, requests)
            asked = requests[0].version
            assert asked is not None, "a guest's request names its version"
            for number, request in enumerate(requests):
                stream = TextStream(self._source.renderer.decode, question.stop)
                self._samples[request.request_id] = _Sample(answer, number, stream)
            answer.events.put(AnswerBegan("base" if asked == BASE_VERSION else f"{name}@{asked}", prompt_ids))
            self._changed.notify_all()
        return answer

    def cancel(self, answer: AnswerUnderWay) -> None:
        """Ends an answer that nobody is waiting for any more."""
        with self._changed:
            names = [name for name, one in self._samples.items() if one.answer is answer]
            for name in names:
                del self._samples[name]
        if names:
            self._abort(answer.guest, names)

    # A question

    def _model(self, model: str) -> tuple[SharedGuest, str, int | None]:
        """Returns the guest for a model's name, the name without a version, and the version. With several
        policies, `policy` means the first."""
        first = next(iter(self._guests))
        if model == "base":
            return self._guests[first], "base", BASE_VERSION
        name, at, version = model.partition("@")
        name = first if name == "policy" else name
        guest = self._guests.get(name)
        if guest is None or (at and version not in map(str, guest.versions)):
            there = ", ".join(self.models().names)
            raise QuestionRefused(
                NoAnswer(
                    404,
                    f"the model {model!r} does not exist: choose one of {there}",
                    "model_not_found",
                    "model",
                )
            )
        return guest, name, int(version) if at else None

    def _prompt_ids(self, question: Question, longest: int) -> tuple[int, ...]:
        renderer = self._source.renderer
        chars = len(question.text) + sum(len(content) for _, content in question.messages)
        if chars > longest * MOST_CHARS_OF_A_TOKEN or len(question.token_ids) >= longest:
            raise QuestionRefused(
                _too_long(question, f"it has {max(chars, len(question.token_ids))} characters", longest)
            )
        if question.token_ids:
            return question.token_ids
        if not question.messages:
            return renderer.text_ids(question.text)
        messages = [{"role": role, "content": content} for role, content in question.messages]
        if unknown := {message["role"] for message in messages}.difference(ROLES):
            roles = ", ".join(ROLES)
            raise QuestionRefused(
                NoAnswer(400, f"the role {min(unknown)!r} is not one of {roles}", "invalid_value", "messages")
            )
        try:
            return renderer.prompt_ids(prompt_of(messages))
        except ModelError as error:
            raise QuestionRefused(NoAnswer(400, str(error), "invalid_value", "messages")) from error

    def _sampling(self, question: Question, room: int) -> SamplingParams:
        longest = question.max_tokens or min(self._source.max_tokens, max(1, room))
        if longest > room:
            raise QuestionRefused(
                _too_long(
                    question, f"{longest} tokens are requested, but there is room for {max(0, room)}", None
                )
            )
        if not 0 <= question.temperature <= HOTTEST:
            raise QuestionRefused(
                NoAnswer(
                    400, f"temperature must be between 0 and {HOTTEST:g}", "invalid_value", "temperature"
                )
            )
        return SamplingParams(longest, question.temperature, question.top_p)

    def _submitted(self, guest: SharedGuest, requests: list[Request]) -> list[Request]:
        try:
            return guest.ask(requests)
        except RequestRefused as error:
            raise QuestionRefused(NoAnswer(400, error.message, "invalid_value")) from error
        except EngineError as error:
            raise QuestionRefused(_unavailable(error.message)) from error

    # The thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._samples and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                asked = {id(one.answer.guest): one.answer.guest for one in self._samples.values()}
            for guest in asked.values():
                self._advance(guest)
            if self._source.shared.resting:
                time.sleep(WHILE_ASLEEP_S)

    def _advance(self, guest: SharedGuest) -> None:
        try:
            outputs, in_flight = guest.advance()
        except ENGINE_TROUBLE as error:
            self._engine_failed(guest, error)
            return
        started_s = time.thread_time()
        for output in outputs:
            self._tell(output.request_id, output.sampled, output.finish)
        for request in in_flight:
            self._tell(request.request_id, request.sampled, None)
        self.used_s += time.thread_time() - started_s

    def _tell(self, name: str, sampled: Sampled, finish: FinishReason | None) -> None:
        with self._changed:
            sample = self._samples.get(name)
            if sample is None:
                return
            answer = sample.answer
            wanted = answer.question.stream or answer.question.stop or finish is not None
            if not wanted or (finish is None and len(sampled) == sample.tokens):
                return
            new = slice(sample.tokens, None)
            tokens, text = sample.text.add(sampled.token_ids[new])
            sample.tokens = len(sampled)
            text += "" if finish is None else sample.text.end()
            answer.events.put(
                Piece(sample.number, text, tuple(tokens), sampled.token_ids[new], sampled.logprobs[new])
            )
            stopped = sample.text.stopped
            if finish is None and not stopped:
                return
            del self._samples[name]
            if finish == "abort":
                answer.events.put(_unavailable("the answer was cut off"))
            else:
                answer.events.put(AnswerEnded(sample.number, "stop" if stopped or finish is None else finish))
        if finish is None:
            self._abort(answer.guest, [name])

    def _abort(self, guest: SharedGuest, names: list[str]) -> None:
        try:
            guest.abort(names)
        except ENGINE_TROUBLE as error:  # Also an error of a step that failed for others meanwhile.
            self._engine_failed(guest, error)

    def _engine_failed(self, guest: SharedGuest, error: Exception) -> None:
        logger.warning("in-flight chat answers were dropped: %s", error)
        self._give_up(guest, _unavailable(f"the engine failed: {error}"))

    def _give_up(self, guest: SharedGuest | None, refused: NoAnswer) -> None:
        """Tells everybody who asked this guest (None: any guest) that no answer will come."""
        with self._changed:
            lost = [name for name, one in self._samples.items() if guest in (None, one.answer.guest)]
            for name in lost:
                self._samples.pop(name).answer.events.put(refused)


def _too_many(*, yours: bool) -> NoAnswer:
    whose = f"{MOST_OF_A_CALLER} of your answers" if yours else f"{MOST_SAMPLES_WAITING} answers"
    why = f"at most {whose} can be in progress at once: ask again later"
    return NoAnswer(429, why, "rate_limit_exceeded", None, RETRY_AFTER_S)


def _unavailable(why: str) -> NoAnswer:
    return NoAnswer(503, why, "unavailable", None, RETRY_AFTER_S)


def _too_long(question: Question, why: str, longest: int | None) -> NoAnswer:
    param = "messages" if question.messages else "prompt"
    limit = "" if longest is None else f", prompt and answer together may have at most {longest} tokens"
    return NoAnswer(400, f"this is too long: {why}{limit}", "context_length_exceeded", param)
