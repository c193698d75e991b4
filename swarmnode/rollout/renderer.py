"""Text to token ids and back, for one tokenizer.

tasks -> prompt text -> [renderer] -> prompt ids -> engine -> completion ids -> [renderer] -> text -> rewards
exchange -> a stranger's text -> [renderer] -> completion ids -> trainer

Only our own tokenizer's chat template is ever applied; none comes from the wire.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swarmnode.errors import ModelError
from swarmnode.types import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Renderer:
    """How one policy reads prompts and writes answers.

    >>> renderer = Renderer(tokenizer)                  # doctest: +SKIP
    >>> renderer.decode(renderer.prompt_ids("2+2"))  # doctest: +SKIP
    '2+2'
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", eos_token_ids: Sequence[int] | None = None
    ) -> None:
        """`eos_token_ids`: every token that ends an answer, the one we write ourselves first."""
        # Whether the stubs of transformers know a return type changes from release to release.
        self._tokenizer: Any = tokenizer
        if eos_token_ids is None:
            own = self._tokenizer.eos_token_id
            eos_token_ids = () if own is None else (own,)
        if not eos_token_ids:
            raise ModelError("this tokenizer has no EOS token", hint="pass eos_token_ids")
        self.eos_token_ids = tuple(eos_token_ids)

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        """A task's prompt as the policy expects it: as a user's turn where there is a chat template."""
        if not self._tokenizer.chat_template:
            return tuple(self._tokenizer.encode(text))
        turn = [{"role": "user", "content": text}]
        chat = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        # The template has written the special tokens already.
        return tuple(self._tokenizer.encode(str(chat), add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without EOS and other special tokens."""
        text_ids = [token for token in token_ids if token not in self.eos_token_ids]
        return str(
            self._tokenizer.decode(text_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def encode_completion(self, text: str, finish: FinishReason) -> tuple[int, ...]:
        """Token ids for an answer that we only know as text, with EOS where its author stopped by itself."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return (*ids, self.eos_token_ids[0]) if finish == "stop" else tuple(ids)
