"""A group on its way: one example, its completions as far as they have come, and how many it is to get.

tasks -> Example -> [OpenGroup] <-> partial.py <-> engine
                        |
                        v  Answered -> scoring

tasks -> prompt text -> [Renderer] -> prompt ids -> engine -> completion ids -> [Renderer] -> text -> rewards
exchange -> a stranger's text -> [Renderer] -> completion ids -> trainer

Only our own tokenizer's chat template is ever applied; none comes from the wire, and neither does a message:
a stranger's prompt is drawn again from our own copy of its task.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from swarmnode.errors import ModelError
from swarmnode.rollout.engine import NOTHING, Output, Request, Sampled, SamplingParams
from swarmnode.types import (
    CHAT_MARK,
    Completion,
    Example,
    ExampleKey,
    FinishReason,
    Message,
    Stretch,
    messages_of,
    tools_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swarmnode.chat import Turn

logger = logging.getLogger(__name__)

EndReason = Literal["stop", "length"]
"""Reason why a completion is whole; an aborted one goes on."""

MOST_TOKENS_OF_A_CHARACTER = 4
"""Tokens of the longest character in UTF-8, one for each byte."""

RESUMED_FIRST = 1 << 30
"""Added to the priority of a request that has tokens already, so that it goes before all others."""


class Renderer:
    """Converts between text and token ids of one policy: prompts, conversations and answers.

    >>> renderer = Renderer(tokenizer)                  # doctest: +SKIP
    >>> renderer.decode(renderer.prompt_ids("2+2"))  # doctest: +SKIP
    '2+2'
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        eos_token_ids: Sequence[int] | None = None,
        template_options: Mapping[str, Any] | None = None,
        *,
        raw_prompts: bool = False,
    ) -> None:
        """`eos_token_ids`: every token that ends an answer, first the one that we write. `template_options`:
        further arguments of the chat template (policy.chat_template). `raw_prompts`: a prompt of one text is
        read as it is, without a template."""
        # Whether the stubs of transformers know a return type changes from release to release.
        self._tokenizer: Any = tokenizer
        if eos_token_ids is None:
            own = self._tokenizer.eos_token_id
            eos_token_ids = () if own is None else (own,)
        if not eos_token_ids:
            raise ModelError("this tokenizer has no EOS token", hint="pass eos_token_ids")
        self.eos_token_ids = tuple(eos_token_ids)
        self._template_options = dict(template_options or {})
        self._raw_prompts = raw_prompts
        self._looked_for: set[str] = set()
        """Tools of which it is known whether the policy is told of them."""
        added, template = _added_tokens(self._tokenizer), str(self._tokenizer.chat_template or "")
        self._marks = marks_of(spelt for spelt, special in added if special)
        written = (spelt for spelt, special in added if special or (spelt.strip() and spelt in template))
        self._marks_of_template = marks_of(written)
        """Those, and what else the chat template writes as one token, such as <tool_response>."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        """Returns a task's prompt as token ids: its conversation through the chat template or, without one,
        its texts one after the other."""
        if self._raw_prompts and not text.startswith(CHAT_MARK):
            return tuple(self._tokenizer.encode(text))
        messages, tools = messages_of(text), tools_of(text)
        shown = self._shown(messages, tools)
        if not {tool["function"]["name"] for tool in tools} <= self._looked_for:
            self._look_for_tools(messages, tools)
        # A template has written the special tokens already.
        return tuple(self._tokenizer.encode(shown, add_special_tokens=not self._tokenizer.chat_template))

    def _shown(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in messages)
        return self._chat(messages, tools)

    def _look_for_tools(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Warns, once for each tool, if neither the chat template nor the prompt mentions it."""
        names = [str(tool["function"]["name"]) for tool in tools]
        plain = self._shown(messages)
        # A tool may be called like a word: what tells of it writes add(1, 2), add: or `add`.
        silent = [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}[^\w\s]", plain)]
        new = [name for name in silent if name not in self._looked_for]
        if new and plain == self._shown(messages, tools):
            logger.warning(
                "the policy is not told of its tools %s: its chat template does not show them. Say in"
                " the prompt what they do and how they are called, or take another --model",
                ", ".join(new),
            )
        self._looked_for.update(names)

    def observation_ids(self, observed: Sequence[Message]) -> tuple[int, ...]:
        """Returns an environment's messages as the policy reads them behind its own turn and EOS, up to the
        opening of its next turn: as the chat template writes them, or as lines of text without one. Control
        marks spelt out in the messages are text, as in the policy's own. Raises ModelError if the template
        cannot express it."""
        # No text has its own digest in it. So what stands for the policy's turn is not found in what is
        # observed, and what is put into each mark is found again in what the template wrote.
        written = json.dumps([message["content"] for message in observed]).encode()
        unique = hashlib.blake2b(written, digest_size=16).hexdigest()
        shown = [
            {**message, "content": unique.join(spelt_out(message["content"], self._marks_of_template))}
            for message in observed
        ]
        text = self._observed(shown, f"what-the-assistant-said-{unique}")
        return tuple(token for part in text.split(unique) for token in self._plain_ids(part))

    def _observed(self, observed: Sequence[Message], turn: str) -> str:
        lines = "\n".join(message["content"] for message in observed)
        if not self._tokenizer.chat_template:
            return f"\n{lines}\n"
        # Many templates know no role but the user's and the assistant's: they raise, or leave out the rest.
        # Those want the two to take turns, so that several messages are one.
        with suppress(ModelError):
            behind = self._behind_a_turn(observed, turn)
            if all(message["content"].strip() in behind for message in observed):
                return behind
        return self._behind_a_turn([{"role": "user", "content": lines}], turn)

    def _behind_a_turn(self, observed: Sequence[Message], turn: str) -> str:
        """Returns the chat template's text behind a turn of the policy; `turn` is the placeholder for that
        turn."""
        asked, said = {"role": "user", "content": "."}, {"role": "assistant", "content": turn}
        _, found, behind = self._chat([asked, said, *observed]).rpartition(turn)
        if not found:
            raise ModelError(
                "this model's chat template leaves out what the assistant said",
                hint="it can hold no conversation with an environment: take another --model",
            )
        ends = (str(self._tokenizer.decode([token])) for token in self.eos_token_ids)
        return next((behind.removeprefix(end) for end in ends if behind.startswith(end)), behind)

    def encode_turns(
        self, turns: Sequence["Turn"], finish: FinishReason
    ) -> tuple[tuple[int, ...], tuple[Stretch, ...]]:
        """Returns the token ids of a conversation known only as text, and the ranges of them that the policy
        reads and does not learn: observations, and the EOS before each, since its author may not have sampled
        it. The last turn ends as in `encode_completion`."""
        ids: list[int] = []
        given: list[Stretch] = []
        for turn in turns:
            if not turn.observed:
                ids += self.encode_completion(turn.said, finish)
                break
            ids += self._said_ids(turn.said)
            start = len(ids)
            ids += (self.eos_token_ids[0], *self.observation_ids(turn.observed))
            given.append((start, len(ids)))
        return tuple(ids), tuple(given)

    def _said_ids(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a policy's text. Decoded text has no special tokens, so none are read from
        it: a stranger's spelling must neither end a turn nor begin one."""
        # The tokenizer's own switch for it would be on for all threads.
        return tuple(token for part in spelt_out(text, self._marks) for token in self._plain_ids(part))

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _chat(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        from jinja2 import TemplateError

        options = {"tools": list(tools)} if tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, **self._template_options, **options, add_generation_prompt=True, tokenize=False
                )
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            system = "say what the system says in the user's message, or " if "system" in roles else ""
            raise ModelError(
                f"this model's chat template does not take messages of {roles}: {error}",
                hint=f"{system}take another --model",
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a completion, without EOS and other special tokens."""
        text_ids = [token for token in token_ids if token not in self.eos_token_ids]
        return str(
            self._tokenizer.decode(text_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token, special ones spelt out. A character of several tokens stands at its
        last one."""
        found, before, waiting = list[str](), list[int](), list[int]()
        for token in token_ids:
            waiting.append(token)
            text = self._spelt([*before, *waiting])[len(self._spelt(before)) :]
            if text.endswith("\ufffd") and len(waiting) < MOST_TOKENS_OF_A_CHARACTER:
                found.append("")
                continue
            found.append(text)
            before, waiting = waiting, []
        return found

    def _spelt(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)) if token_ids else ""

    def encode_completion(self, text: str, finish: FinishReason) -> tuple[int, ...]:
        """Returns the token ids of an answer known only as text, with EOS if its author stopped by itself."""
        ids = self._said_ids(text)
        return (*ids, self.eos_token_ids[0]) if finish == "stop" else ids


def _added_tokens(tokenizer: Any) -> list[tuple[str, bool]]:
    """Returns the spellings of the tokens that a tokenizer finds in a text, and True for each that it leaves
    out of a decoded one."""
    try:
        return [(str(token), token.special) for token in tokenizer.added_tokens_decoder.values()]
    except NotImplementedError:
        return []  # That of mistral-common, which reads none out of a text.


def marks_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Returns a pattern of all spellings of special tokens. None: none has several characters."""
    spelt = sorted(re.escape(token) for token in tokens if len(token) > 1)
    return re.compile("|".join(spelt)) if spelt else None


def spelt_out(text: str, marks: re.Pattern[str] | None) -> list[str]:
    """Returns the text in parts, none of which contains one of these marks.

    >>> spelt_out("7<eos>8", marks_of(["<eos>"])), spelt_out("7", marks_of(["<eos>"]))
    (['7<', 'eos>8'], ['7'])
    """
    cuts = [0]
    while marks is not None and (found := marks.search(text, cuts[-1])) is not None:
        cuts.append(found.start() + 1)
    return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


@dataclass(frozen=True, slots=True)
class Answered:
    """An example with all its completions, not scored yet."""

    example: Example
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class OpenCompletion:
    """One completion of a group: its tokens so far, and the reason for its end if it ended. While a request
    is in the engine, its new tokens are there and not here."""

    sampled: Sampled = NOTHING
    finish: EndReason | None = None
    observed: tuple[tuple[Message, ...], ...] = ()
    """Environment's messages for each inserted range of tokens."""
    asking: bool = False
    """True if a turn is over and its environment has not answered yet."""
    broken_off: bool = False
    """True if it ended because its environment was lost."""

    @property
    def turns(self) -> int:
        """Number of the policy's turns, including the one under way."""
        return len(self.observed) + 1


@dataclass(slots=True)
class OpenGroup:
    """An example that is being answered. `serial` identifies groups and counts up: the lower, the older."""

    serial: int
    example: Example
    prompt_ids: tuple[int, ...]
    members: list[OpenCompletion]
    oldest_version: int | None = None
    """Lower bound of the policy versions of all tokens, in the engine or here. None: no request was made
    yet."""

    @property
    def complete(self) -> bool:
        return all(member.finish is not None for member in self.members)

    @property
    def unfinished(self) -> list[int]:
        """Places of the members that have not ended."""
        return [place for place, member in enumerate(self.members) if member.finish is None]

    @property
    def asking(self) -> list[int]:
        """Places of the members that wait for their environment."""
        return [place for place, member in enumerate(self.members) if member.asking]

    @property
    def for_the_engine(self) -> list[int]:
        """Places of the members of which more is to be sampled at once."""
        return [place for place in self.unfinished if not self.members[place].asking]

    @property
    def tokens(self) -> int:
        """Number of tokens of all completions, without those still in the engine."""
        return sum(len(member.sampled) for member in self.members)

    @property
    def path(self) -> tuple[int, ...]:
        """Path through a pipeline of the group's first member with one. (): no member has one."""
        return next((member.sampled.path for member in self.members if member.sampled.path), ())

    @property
    def name(self) -> str:
        """The group's name in log lines."""
        return f"example {self.example.key.index} of {self.example.key.task}"

    def request_id(self, place: int) -> str:
        return f"{self.serial}/{place}"

    def request(self, place: int, sampling: SamplingParams) -> Request:
        """Returns the engine's request for one member. Resumed requests go before new ones, then older groups
        before younger."""
        sampled = self.members[place].sampled
        if not sampled.path and self.path:
            sampled = replace(sampled, path=self.path)
        priority = self.serial - (RESUMED_FIRST if sampled else 0)
        return Request(self.request_id(place), self.prompt_ids, sampling, sampled, priority=priority)

    def asked_of(self, version: int) -> None:
        """Records that a member goes to an engine whose newest policy is `version`."""
        self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)

    def record(self, place: int, output: Output) -> None:
        """Records an output of the engine, ended or aborted."""
        finish = None if output.finish == "abort" else output.finish
        self.members[place] = replace(self.members[place], sampled=output.sampled, finish=finish)

    def settle_age(self) -> None:
        """Sets the group's age from its spans, which are exact once nothing is in the engine."""
        self.oldest_version = oldest_of(member.sampled.oldest_version for member in self.members)

    def start_over(self) -> None:
        """Forgets every token: the group starts from scratch."""
        self.members = [OpenCompletion()] * len(self.members)
        self.oldest_version = None

    def end_at(self, place: int, max_tokens: int) -> None:
        """Ends a member by length if it has so many tokens: the budget may have changed with a restart."""
        member = self.members[place]
        if len(member.sampled) >= max_tokens:
            self.members[place] = replace(member, finish="length", asking=False)

    def answered(self, renderer: Renderer, *, in_turns: bool = False) -> Answered:
        """Returns the whole group, once it is complete. `in_turns`: its task is an environment."""
        return Answered(self.example, tuple(_completion(one, renderer, in_turns) for one in self.members))


def as_open_group(answered: Answered) -> OpenGroup:
    """Returns a group that was handed out as an open one, to be saved again. It is in no queue, so it needs
    no serial."""
    return OpenGroup(-1, answered.example, (), [_member(completion) for completion in answered.completions])


def completion_seed(seed: int, key: ExampleKey, place: int) -> int:
    """Returns the sampling seed of completion `place` of an example: the same in every run."""
    name = json.dumps([seed, key.task, key.version, key.seed, key.index, place])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def oldest_of(versions: Iterable[int | None]) -> int | None:
    """Returns the oldest known version.

    >>> oldest_of([None, 7, 5]), oldest_of([None])
    (5, None)
    """
    return min((version for version in versions if version is not None), default=None)


def _member(completion: Completion) -> OpenCompletion:
    if completion.logprobs is None or completion.finish == "abort":
        raise ValueError("this completion is not one of a round's")
    sampled = Sampled(
        completion.token_ids, completion.logprobs, completion.spans, completion.path, completion.given
    )
    observed: tuple[tuple[Message, ...], ...] = ()
    if completion.given:
        from swarmnode.chat import turns_of

        observed = tuple(turn.observed for turn in turns_of(completion.text) if turn.observed)
    return OpenCompletion(sampled, completion.finish, observed, broken_off=completion.broken_off)


def turns_so_far(member: OpenCompletion, renderer: Renderer) -> "list[Turn]":
    """Returns the turns of a policy and its environment, each decoded from its own tokens."""
    from swarmnode.chat import Turn

    sampled, start, turns = member.sampled, 0, list[Turn]()
    for (end, after), observed in zip(sampled.given, member.observed, strict=True):
        turns.append(Turn(renderer.decode(sampled.token_ids[start:end]), observed))
        start = after
    if start < len(sampled):
        turns.append(Turn(renderer.decode(sampled.token_ids[start:])))
    return turns


def _text(member: OpenCompletion, renderer: Renderer, in_turns: bool) -> str:
    if not in_turns:
        return renderer.decode(member.sampled.token_ids)
    from swarmnode.chat import transcript

    return transcript(turns_so_far(member, renderer))


def _completion(member: OpenCompletion, renderer: Renderer, in_turns: bool) -> Completion:
    if member.finish is None:
        raise ValueError("this completion has not ended")
    sampled = member.sampled
    return Completion(
        text=_text(member, renderer, in_turns),
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=sampled.spans,
        finish=member.finish,
        path=sampled.path,
        given=sampled.given,
        broken_off=member.broken_off,
    )
