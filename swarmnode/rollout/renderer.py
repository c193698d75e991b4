"""Converts text to token ids and back, for one policy.

tasks -> prompt -> [Renderer] -> prompt ids -> engine -> completion ids -> [Renderer] -> text -> rewards
exchange -> a stranger's text -> [Renderer] -> completion ids -> trainer

Only our own tokenizer's chat template is ever applied; neither templates nor messages come from the wire: a
stranger's prompt is drawn again from our own copy of its task.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from swarmnode.chat import Message, Prompt, Turn, messages_of, tools_of
from swarmnode.errors import ModelError
from swarmnode.types import FinishReason, Stretch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

MOST_TOKENS_OF_A_CHARACTER = 4
"""Tokens of the longest character in UTF-8: one per byte."""


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
        """`eos_token_ids`: every token that ends an answer; the first is the one that we write.
        `template_options`: further arguments of the chat template (policy.chat_template). `raw_prompts`: a
        prompt that is a single text is read unchanged, without a template."""
        # Return types in the stubs of transformers change from release to release.
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
        """Tools for which the warning of `_look_for_tools` is settled."""
        added, template = _added_tokens(self._tokenizer), str(self._tokenizer.chat_template or "")
        self._marks = marks_of(spelt for spelt, special in added if special)
        written = (spelt for spelt, special in added if special or (spelt.strip() and spelt in template))
        self._marks_of_template = marks_of(written)
        """Those, and everything else that the chat template writes as one token, such as <tool_response>."""

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns a task's prompt as token ids: its conversation through the chat template or, without one,
        its texts joined."""
        if self._raw_prompts and isinstance(prompt, str):
            return self.text_ids(prompt)
        messages, tools = messages_of(prompt), tools_of(prompt)
        shown = self._shown(messages, tools)
        if not {tool["function"]["name"] for tool in tools} <= self._looked_for:
            self._look_for_tools(messages, tools)
        # A template has already written the special tokens.
        return self._ids(shown, special=not self._tokenizer.chat_template)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Returns a text as token ids, without the chat template."""
        return self._ids(text)

    def _shown(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in messages)
        return self._chat(messages, tools)

    def _look_for_tools(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Warns, once per tool, if neither the chat template nor the prompt mentions it."""
        names = [str(tool["function"]["name"]) for tool in tools]
        plain = self._shown(messages)
        # A tool may have the name of a common word: a description of it writes add(1, 2), add: or `add`.
        silent = [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}[^\w\s]", plain)]
        new = [name for name in silent if name not in self._looked_for]
        if new and plain == self._shown(messages, tools):
            logger.warning(
                "the policy cannot see its tools %s: its chat template leaves them out. Describe in"
                " the prompt what they do and how to call them, or use another --model",
                ", ".join(new),
            )
        self._looked_for.update(names)

    def observation_ids(self, observed: Sequence[Message]) -> tuple[int, ...]:
        """Returns an environment's messages as the policy reads them after its own turn and EOS, up to the
        start of its next turn: as the chat template writes them, or as lines of text without one. Control
        marks spelt out in the messages are text, as in the policy's own. Raises ModelError if the template
        cannot express them."""
        # No text contains its own digest. So the placeholder of the policy's turn does not occur in the
        # observed text, and the digest put into each mark can be found again in the template's output.
        written = json.dumps([message["content"] for message in observed]).encode()
        unique = hashlib.blake2b(written, digest_size=16).hexdigest()
        shown = [
            {**message, "content": unique.join(spelt_out(message["content"], self._marks_of_template))}
            for message in observed
        ]
        text = self._observed(shown, f"what-the-assistant-said-{unique}")
        return tuple(token for part in text.split(unique) for token in self._ids(part, special=False))

    def _observed(self, observed: Sequence[Message], turn: str) -> str:
        lines = "\n".join(message["content"] for message in observed)
        if not self._tokenizer.chat_template:
            return f"\n{lines}\n"
        # Many templates only know the user's and the assistant's roles: they raise, or leave out the rest.
        # Those want the two to alternate, so several messages become one.
        with suppress(ModelError):
            behind = self._behind_a_turn(observed, turn)
            if all(message["content"].strip() in behind for message in observed):
                return behind
        return self._behind_a_turn([{"role": "user", "content": lines}], turn)

    def _behind_a_turn(self, observed: Sequence[Message], turn: str) -> str:
        """Returns the chat template's text after a turn of the policy; `turn` is the placeholder for that
        turn."""
        asked, said = {"role": "user", "content": "."}, {"role": "assistant", "content": turn}
        _, found, behind = self._chat([asked, said, *observed]).rpartition(turn)
        if not found:
            raise ModelError(
                "this model's chat template drops assistant messages",
                hint="it cannot have a conversation with an environment: use another --model",
            )
        ends = (str(self._tokenizer.decode([token])) for token in self.eos_token_ids)
        return next((behind.removeprefix(end) for end in ends if behind.startswith(end)), behind)

    def encode_turns(
        self, turns: Sequence[Turn], finish: FinishReason
    ) -> tuple[tuple[int, ...], tuple[Stretch, ...]]:
        """Returns the token ids of a conversation known only as text, and the ranges that the policy reads
        but does not learn: observations, and the EOS before each, since the author may not have sampled it.
        The last turn ends as in `encode_completion`."""
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
        """Returns the token ids of a policy's text. Decoded text has no special tokens, so none are
        recognized in it: a stranger's spelling must neither end a turn nor begin one."""
        # The tokenizer's own switch for this would apply to all threads.
        return tuple(
            token for part in spelt_out(text, self._marks) for token in self._ids(part, special=False)
        )

    def _ids(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        # The engine refuses what is too long; transformers would also warn, in words about itself.
        return tuple(self._tokenizer.encode(text, add_special_tokens=special, verbose=False))

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
            system = "move the system message into the user message, or " if "system" in roles else ""
            raise ModelError(
                f"this model's chat template does not accept the roles {roles}: {error}",
                hint=f"{system}use another --model",
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a completion, without EOS and other special tokens."""
        text_ids = [token for token in token_ids if token not in self.eos_token_ids]
        return str(
            self._tokenizer.decode(text_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token, with special ones spelt out. A character of several tokens appears
        at its last one."""
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
        """Returns the token ids of an answer known only as text, with EOS if its author finished it."""
        ids = self._said_ids(text)
        return (*ids, self.eos_token_ids[0]) if finish == "stop" else ids


def _added_tokens(tokenizer: Any) -> list[tuple[str, bool]]:
    """Returns the spellings of the tokens that a tokenizer recognizes in a text, and True for each that it
    omits from decoded text."""
    try:
        return [(str(token), token.special) for token in tokenizer.added_tokens_decoder.values()]
    except NotImplementedError:
        return []  # The tokenizer of mistral-common, which recognizes none in a text.


def marks_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Returns a pattern of all spellings of special tokens. None: none is longer than one character."""
    spelt = sorted(re.escape(token) for token in tokens if len(token) > 1)
    return re.compile("|".join(spelt)) if spelt else None


def spelt_out(text: str, marks: re.Pattern[str] | None) -> list[str]:
    """Splits the text into parts that contain none of these marks.

    >>> spelt_out("7<eos>8", marks_of(["<eos>"])), spelt_out("7", marks_of(["<eos>"]))
    (['7<', 'eos>8'], ['7'])
    """
    cuts = [0]
    while marks is not None and (found := marks.search(text, cuts[-1])) is not None:
        cuts.append(found.start() + 1)
    return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
