"""What it brings to keep keys and values between the turns of conversations: the same ones, kept and not.

benchmarks/environments.py -> [kept_kv_gain] -> EmbeddedEngine

All conversations play each turn together: 16 to 32 tokens, behind which a tool answers with 64 to 256. The
next turn begins with the whole conversation so far, read over again in batches as large as the engine makes
them, or with what was kept of it. A rehearsal finds for each turn a token at which it is to stop; from then
on everybody samples the same tokens again, because they are seeded.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from common import cpu_seconds, interleaved, middle, ratios
from transformers import Qwen2Config, Qwen2ForCausalLM

from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import NOTHING, Request, Sampled, SamplingParams

VOCABULARY = 512
PROMPT_TOKENS = 48
TURN_TOKENS = 16, 32
ANSWER_TOKENS = 64, 256
CONVERSATIONS, TURNS = 32, 6
MAX_LENGTH = 2048


@dataclass(frozen=True)
class KeptGain:
    """What was measured."""

    gain: float
    """CPU time without / with: the median of the rounds."""
    spread: tuple[float, float]
    """Quartiles of the same."""
    cpu_s: dict[str, float]
    """Median CPU seconds of all conversations, `kept` and `again`."""
    tokens_per_cpu_s: dict[str, float]
    """Sampled tokens per CPU second."""
    reprefilled_tokens: dict[str, int]
    """Tokens computed again in one round."""


def kept_kv_gain(repeats: int, conversations: int = CONVERSATIONS, turns: int = TURNS) -> KeptGain:
    """Play the same conversations with `goes_on` and without, interleaved."""
    play = Conversations(conversations, turns)
    sampled = play.rehearse()
    variants = {"kept": True, "again": False}
    reprefilled = {name: play.reprefilled(goes_on) for name, goes_on in variants.items()}  # warms up as well
    found = interleaved(
        {name: lambda g=goes_on: cpu_seconds(lambda: play.all(g)) for name, goes_on in variants.items()},
        repeats,
    )
    gain, spread = middle(ratios(found["again"], found["kept"]))
    cpu_s = {name: middle(seconds)[0] for name, seconds in found.items()}
    rates = {name: sampled / seconds for name, seconds in cpu_s.items()}
    return KeptGain(gain, spread, cpu_s, rates, reprefilled)


class Conversations:
    """Conversations whose lengths are scripted, on engines with a row for each."""

    def __init__(self, count: int, turns: int) -> None:
        rng = random.Random(0)
        model = small_policy()
        self._engines = {goes_on: EmbeddedEngine(model, (), count, MAX_LENGTH) for goes_on in (True, False)}
        """One for each: nobody finds what another has kept."""
        self._prompts = [_tokens(rng, PROMPT_TOKENS) for _ in range(count)]
        self._answers = [
            [_tokens(rng, rng.randint(*ANSWER_TOKENS)) for _ in range(count)] for _ in range(turns - 1)
        ]
        self._stops: list[list[tuple[int, ...]]] = [[()] * count for _ in range(turns)]
        """The tokens at which each turn of each conversation stops."""

    def rehearse(self) -> int:
        """Find where turns are to stop. Returns the tokens that all of them have together."""
        rng = random.Random(1)
        states = [NOTHING] * len(self._prompts)
        for turn in range(len(self._stops)):
            before = self._with_answers(turn, states)
            states = []
            for number, (start, full) in enumerate(zip(before, self._turn(turn, before, False), strict=True)):
                said = full.token_ids[len(start) :]
                at = rng.choice(
                    [at for at in range(TURN_TOKENS[0] - 1, len(said)) if said[at] not in said[:at]]
                )
                self._stops[turn][number] = (said[at],)
                states.append(_cut(full, len(start) + at + 1))
        return sum(len(state) - sum(end - start for start, end in state.given) for state in states)

    def all(self, goes_on: bool) -> list[Sampled]:
        """Play them from the first turn to the last."""
        states = [NOTHING] * len(self._prompts)
        for turn in range(len(self._stops)):
            states = self._turn(turn, self._with_answers(turn, states), goes_on)
        return states

    def reprefilled(self, goes_on: bool) -> int:
        """Tokens that are computed again when all are played once."""
        engine = self._engines[goes_on]
        before = engine.stats().reprefilled_tokens
        self.all(goes_on)
        return engine.stats().reprefilled_tokens - before

    def _with_answers(self, turn: int, states: Sequence[Sampled]) -> list[Sampled]:
        if not turn:
            return list(states)
        return [_answered(*pair) for pair in zip(states, self._answers[turn - 1], strict=True)]

    def _turn(self, turn: int, states: Sequence[Sampled], goes_on: bool) -> list[Sampled]:
        """One turn of all conversations."""
        engine = self._engines[goes_on]
        engine.submit(
            Request(
                str(number),
                self._prompts[number],
                SamplingParams(
                    len(state) + TURN_TOKENS[1], seed=number, stop_token_ids=self._stops[turn][number]
                ),
                state,
                goes_on=goes_on,
            )
            for number, state in enumerate(states)
        )
        ended: dict[int, Sampled] = {}
        while len(ended) < len(states):
            ended |= {int(output.request_id): output.sampled for output in engine.step()}
        return [ended[number] for number in range(len(states))]


def _cut(sampled: Sampled, count: int) -> Sampled:
    """Its first tokens."""
    spans = (replace(sampled.spans[0], end=count),)
    return replace(
        sampled, token_ids=sampled.token_ids[:count], logprobs=sampled.logprobs[:count], spans=spans
    )


def _answered(sampled: Sampled, answer: tuple[int, ...]) -> Sampled:
    """With what a tool says behind it."""
    start, end = len(sampled), len(sampled) + len(answer)
    longer = sampled.extended(answer, (0.0,) * len(answer), [replace(sampled.spans[0], start=start, end=end)])
    return replace(longer, given=(*sampled.given, (start, end)))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))


def small_policy() -> Qwen2ForCausalLM:
    """Three million parameters, as in rollout.py, for longer sequences."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()
