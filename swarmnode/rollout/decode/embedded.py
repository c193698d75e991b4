"""The built-in engine: our own decode loop over a transformers model, continuous, on a CPU or any GPU.

schedule/partial_rollouts.py -> submit -> torch_engine.py -> [EmbeddedEngine] -> Output
                                                           |
              [PromptStore] (new prompts)   slots.py <-----+--> decoder.py -> sampler.py     (one step)
                |   |                          ^   |
      kept.py --+   +------> decoder.py -------+   +--> kept.py (conversations, when a turn ends)
                       keys, values and last hidden states

One `step` decodes all running rows together, whatever their policies, lets waiting requests take the free
rows (their prompts are computed apart, so they join when it samples), and samples one token for everybody.

Each distinct prompt is computed once, in batches, and shared by all requests that wait with it. The samples
of one GRPO group have one prompt, and rows become free one at a time. So when a prompt is needed, those
needed next are computed with it, up to `BATCH_TOKENS`. The last prompts that nobody waits with any more are
kept while they have no more tokens than that: under refill, the rest of a group comes a little later. What a
resumed request had sampled is part of its prompt. A new policy makes everything computed worthless.

A conversation comes turn by turn, each one behind all that was before. Its keys and values are kept when a
turn ends (kept.py), and only what is new is computed for the next one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import EngineError
from swarmnode.rollout.decode.cached_attention import PromptAttention, Scratch, cache_attention
from swarmnode.rollout.decode.decoder import Attention, Decoder, Lookback
from swarmnode.rollout.decode.running import (
    BATCH_TOKENS,
    KEPT_TOKENS,
    LOGITS_AT_ONCE,
    DecodePolicy,
    alike,
    within,
)
from swarmnode.rollout.decode.slots import Slots, cache_size
from swarmnode.rollout.decode.torch_engine import LoraPairs, TorchEngine
from swarmnode.rollout.decode.weights import FusedWeights, Layers, longest_sequence
from swarmnode.rollout.engine import BASE_VERSION, Capabilities, Output, PolicyUpdate, Request

if TYPE_CHECKING:
    # Loaded with the first conversation: most nodes have none.
    from swarmnode.rollout.decode.kept import KeptStore

# ---- the prompts of waiting requests ----

PromptKey = tuple[int | None, tuple[int, ...]]
"""Key of a prompt: policy version and token ids."""

PolicyOf = Callable[[int | None], DecodePolicy]
"""Returns the policy of a requested version. None: the newest one."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts computed together, padded on the right to one width."""

    cache: Tensor
    """Keys and values, laid out as in the bands."""
    hidden: Tensor
    """Hidden states [prompts, hidden] of the last tokens."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A distinct prompt of the waiting requests, and the place of its computed state."""

    ids: tuple[int, ...]
    version: int | None
    """Policy version that it is computed for. None: the newest at its start."""
    waiting: int = 0
    batch: PromptBatch | None = None
    place: int = 0
    """Index in `batch`."""
    kept_tokens: int = 0
    """Leading tokens whose keys and values were kept from an earlier turn."""


class PromptStore:
    """The prompts of the waiting requests, in the order of their first request, and the last ones that
    left."""

    def __init__(self, decoder: Decoder) -> None:
        self.kept: KeptStore | None = None
        """What prompts may continue; None until there is anything."""
        self._decoder = decoder
        self._prompts: dict[PromptKey, Prompt] = {}
        self._left: dict[PromptKey, Prompt] = {}  # nobody waits with them; the last one left last

    def expect(self, request: Request) -> None:
        """Counts one more waiting request with this prompt."""
        version, ids = key = _key(request)
        if (prompt := self._prompts.get(key)) is None:
            prompt = self._prompts[key] = self._left.pop(key, None) or Prompt(ids, version)
        prompt.waiting += 1

    def leave(self, request: Request) -> Prompt:
        """Counts one fewer waiting request with this prompt: it starts now, or was aborted."""
        prompt = self._prompts[_key(request)]
        prompt.waiting -= 1
        if prompt.waiting == 0:
            del self._prompts[_key(request)]
            if not request.sampled:
                # Nobody else goes on with what this one has sampled.
                self._left[_key(request)] = prompt
                self._keep_last(BATCH_TOKENS)
        return prompt

    def forget(self) -> None:
        """Discards all computed prompts: the policies have changed."""
        self._left.clear()
        for prompt in self._prompts.values():
            prompt.batch, prompt.kept_tokens = None, 0

    def compute(self, prompts: Iterable[Prompt], policy_of: PolicyOf) -> None:
        """Computes these prompts unless they are computed. If one is missing, some of the next ones are
        computed with it."""
        needed = list(dict.fromkeys(prompt for prompt in prompts if prompt.batch is None))
        if not needed:
            return
        by_version: dict[int | None, list[Prompt]] = {}
        for prompt in [*needed, *self._next(needed)]:
            by_version.setdefault(prompt.version, []).append(prompt)
        for version, same in by_version.items():
            policy = policy_of(version)
            fresh = self._continue(same, policy)
            for batch in alike([len(prompt.ids) for prompt in fresh]):
                self._compute_batch([fresh[index] for index in batch], policy.layers)

    def _continue(self, prompts: Sequence[Prompt], policy: DecodePolicy) -> list[Prompt]:
        """Computes the prompts that continue a kept conversation. Returns the others."""
        if self.kept is None:
            return list(prompts)
        from swarmnode.rollout.decode.kept import continue_batch

        found = [(prompt, self.kept.find(policy, prompt.ids)) for prompt in prompts]
        going_on = [(prompt, kept) for prompt, kept in found if kept is not None]
        for some in within(going_on, [len(prompt.ids) - kept.computed for prompt, kept in going_on]):
            sequences = [prompt.ids for prompt, _ in some]
            caches, hidden = continue_batch(
                self._decoder, policy.layers, sequences, [kept for _, kept in some]
            )
            for (prompt, kept), cache, last in zip(some, caches, hidden.split(1), strict=True):
                prompt.batch, prompt.place = PromptBatch(cache, last), 0
                prompt.kept_tokens = kept.computed
        return [prompt for prompt, kept in found if kept is None]

    def _next(self, needed: Sequence[Prompt]) -> Iterator[Prompt]:
        """Returns the prompts to compute ahead of their time. Ones computed so before count as well."""
        known = [prompt for prompt in self._prompts.values() if prompt.batch is not None]
        tokens = sum(len(prompt.ids) for prompt in (*needed, *known))
        chosen = set(needed)
        for prompt in self._prompts.values():
            if prompt.batch is None and prompt not in chosen:
                tokens += len(prompt.ids)
                if tokens > BATCH_TOKENS:
                    return
                yield prompt

    def _keep_last(self, most_tokens: int) -> None:
        """Forgets the prompts that left first."""
        tokens = sum(len(prompt.ids) for prompt in self._left.values())
        for key, prompt in list(self._left.items()):
            if tokens <= most_tokens:
                return
            tokens -= len(prompt.ids)
            del self._left[key]

    def _compute_batch(self, prompts: Sequence[Prompt], layers: Layers) -> None:
        batch = compute_batch(self._decoder, layers, [prompt.ids for prompt in prompts])
        for place, prompt in enumerate(prompts):
            prompt.batch, prompt.place = batch, place


def compute_batch(
    decoder: Decoder, layers: Layers, sequences: Sequence[Sequence[int]], tails: Sequence[int] | None = None
) -> PromptBatch:
    """Runs one forward pass over whole sequences. `hidden` has the last token of each or, flat, the last
    `tails[i]` tokens of each."""
    embedding = decoder.weights.embedding
    device = embedding.device
    width = max(map(len, sequences))
    tokens = torch.tensor([(*ids, *[0] * (width - len(ids))) for ids in sequences], device=device)
    size = cache_size(decoder.heads.shape, len(sequences), width)
    cache = torch.empty(size, dtype=embedding.dtype, device=device)
    attention = decoder.attention(
        lambda kind: PromptAttention(decoder.heads, kind.rotary.until(width), cache, kind.window)
    )
    ends = [start + len(ids) for start, ids in zip(count(0, width), sequences, strict=False)]
    wanted = [
        place
        for end, tail in zip(ends, tails or [1] * len(sequences), strict=True)
        for place in range(end - tail, end)
    ]
    hidden = decoder.forward(layers, tokens.flatten(), attention, torch.tensor(wanted, device=device))
    return PromptBatch(cache, hidden)


def _key(request: Request) -> PromptKey:
    return request.version, request.prompt_ids + request.sampled.token_ids


# ---- the engine ----

DENSE_SHARE = 0.75
"""Share of living rows below which, if no request waits, the living rows are moved together."""


class EmbeddedEngine(TorchEngine):
    """An `Engine` for dense models of the families in family.py.

    Results do not depend on what else is in the batch, up to the rounding of float sums of other shapes.

    >>> engine = EmbeddedEngine(model, eos_token_ids=(tokenizer.eos_token_id,))         # doctest: +SKIP
    >>> engine.submit([Request("a", (1, 2, 3), SamplingParams(max_tokens=8, seed=0))])  # doctest: +SKIP
    >>> while not (outputs := engine.step()): ...                                       # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_slots: int = 256,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        max_versions: int = 4,
        kept_tokens: int = KEPT_TOKENS,
    ) -> None:
        """`max_length` bounds prompt and completion together; by default what the model was made for. Each of
        `max_versions` policies that are live at once holds a copy of the model's layers. `kept_tokens` bounds
        what is kept for a next turn, and so does what all rows could hold; 0 keeps nothing."""
        place = torch.device(device) if device is not None else model.device
        weights = FusedWeights(model, place)
        capabilities = Capabilities(
            name="embedded",
            inflight=frozenset({"pin", "keep", "recompute", "abort"}),
            max_versions=max_versions,
            max_running=max_slots,
            max_length=longest_sequence(model) if max_length is None else max_length,
            exact_resume=True,
        )
        start = DecodePolicy(0, weights.merged({}), is_base=True)
        super().__init__(capabilities, eos_token_ids, weights.shape.vocab, start, place)
        self._weights = weights
        self._decoder = Decoder(weights)
        self._most_kept = min(kept_tokens, max_slots * capabilities.max_length)
        self._prompts = PromptStore(self._decoder)
        self._slots = self._empty_slots()
        self._scratch = Scratch(place)
        self._longest = 0

    # One step

    @property
    def _tick(self) -> int:
        return self._slots.tick

    def _step(self) -> Sequence[Output]:
        self._decoder.reserve(self._longest)
        hidden = self._admit(self._decode())
        tokens, logprobs = self._sampler.sample(self._decoder.logits(hidden))
        self._slots.append(tokens, logprobs)
        self._counters.generated_tokens += self._slots.alive
        outputs = self._finish(self._ended(tokens))
        self._close_up()
        return outputs

    def _decode(self) -> Tensor | None:
        """Returns the hidden states of the newest tokens, in the order of the slots. None: nothing runs."""
        if not self._running:
            return None
        slots = self._slots
        slots.make_room()
        tokens, positions = slots.newest_tokens(), slots.positions()
        decoder = self._decoder
        bands = slots.bands

        def of_kind(kind: Lookback) -> Attention:
            rotation = kind.rotary.at(positions)
            return cache_attention(
                decoder.heads, bands, slots.tick, positions, rotation, self._scratch, kind.window
            )

        attention = decoder.attention(of_kind)
        layers, *others = {id(r.policy.layers): r.policy.layers for r in self._running.values()}.values()
        if not others:
            return decoder.forward(layers, tokens, attention)
        from swarmnode.rollout.decode.adapters.mixing import PolicyMix

        mixed = [self._running[row].policy.layers for row in slots.rows_in_order]
        return PolicyMix.of(mixed, self._device).forward(decoder, tokens, attention)

    def _admit(self, decoded: Tensor | None) -> Tensor:
        """Gives free rows to waiting requests. Returns the hidden states of all rows, the new ones
        included."""
        order = self._slots.order
        requests = self._queue.take(self._slots.free)
        prompts = self._computed(requests)
        rows = self._slots.claim(len(requests))
        hidden = self._weights.embedding.new_zeros(self._slots.rows, self._weights.shape.hidden)
        if decoded is not None:
            hidden.index_copy_(0, order, decoded)
        for batch, members in _by_batch(rows, prompts):
            own_rows = [row for row, _ in members]
            places = [prompt.place for _, prompt in members]
            self._slots.place(own_rows, [len(prompt.ids) for _, prompt in members], batch.cache, places)
            hidden[own_rows] = batch.hidden[places]
        if requests:
            self._start(rows, requests, [prompt.kept_tokens for prompt in prompts])
        return hidden

    def _computed(self, requests: Iterable[Request]) -> list[Prompt]:
        """Returns the computed prompts of requests that start now."""
        prompts = [self._prompts.leave(request) for request in requests]
        self._prompts.compute(prompts, self._policy)
        return prompts

    def _close_up(self) -> None:
        alive = len(self._running)
        if not alive or len(self._queue) or alive >= DENSE_SHARE * self._slots.rows:
            return
        kept = self._slots.close_up()
        index = torch.tensor(kept, device=self._device)
        self._sampler.keep(index)
        self._stops.keep(index)
        self._running = {row: self._running[former] for row, former in enumerate(kept)}

    # Rows and prompts

    def _harvest(self, rows: Sequence[int], since: int) -> tuple[list[list[int]], list[list[float]]]:
        return self._slots.harvest(rows, since)

    def _release(self, rows: Sequence[int]) -> None:
        self._slots.release(rows)

    def _keep(self, row: int, policy: DecodePolicy, token_ids: Sequence[int]) -> None:
        from swarmnode.rollout.decode.kept import KeptStore

        if self._prompts.kept is None:
            self._prompts.kept = KeptStore(self._most_kept)
        self._prompts.kept.add(policy, token_ids, self._slots.cache_of(row))

    def _clear(self) -> None:
        self._prompts.kept = None
        self._prompts.forget()
        self._slots = self._empty_slots()

    def _line_up(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._prompts.expect(request)
            self._longest = max(self._longest, len(request.prompt_ids) + request.sampling.max_tokens)

    def _leave_line(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._prompts.leave(request)

    def _empty_slots(self) -> Slots:
        limits = self.capabilities.max_running, self.capabilities.max_length
        return Slots(self._weights.shape, *limits, self._weights.embedding.dtype, self._device)

    # Policies

    def _pairs(self, update: PolicyUpdate) -> LoraPairs:
        return self._weights.pairs(update)

    def _check_versions(self, staying: Iterable[DecodePolicy]) -> None:
        live = 1 + sum(policy.version != BASE_VERSION for policy in staying)
        if live > self.capabilities.max_versions:
            raise EngineError(
                f"{live} policy versions would be live, this engine holds {self.capabilities.max_versions}",
                hint='let the oldest requests end first, or update with "keep"',
            )

    def _merge(self, pairs: LoraPairs, former: Layers | None) -> Layers:
        self._prompts.forget()
        return self._weights.merged(pairs, former)

    def _take_over(self, version: int, pairs: LoraPairs, staying: set[DecodePolicy]) -> None:
        super()._take_over(version, pairs, staying)
        if self._prompts.kept is not None:
            self._prompts.kept.forget_others(self._policies.values())

    def _forget_unused(self) -> None:
        super()._forget_unused()
        if self._prompts.kept is not None:
            self._prompts.kept.forget_others(self._policies.values())

    def _base(self) -> DecodePolicy:
        bare = next((policy for policy in self._policies.values() if policy.is_base), None)
        layers = self._weights.merged({}) if bare is None else bare.layers
        return DecodePolicy(BASE_VERSION, layers, is_base=True)

    def _logits(
        self, policy: DecodePolicy, sequences: Sequence[Sequence[int]], tails: Sequence[int]
    ) -> Iterator[Tensor]:
        self._decoder.reserve(max(map(len, sequences)))
        hidden = compute_batch(self._decoder, policy.layers, sequences, tails).hidden
        for piece in hidden.split(max(1, LOGITS_AT_ONCE // self._vocab)):
            yield self._decoder.logits(piece)


def _by_batch(
    rows: Sequence[int], prompts: Sequence[Prompt]
) -> list[tuple[PromptBatch, list[tuple[int, Prompt]]]]:
    """Returns the newcomers by the batch that computed them."""
    members: dict[int, tuple[PromptBatch, list[tuple[int, Prompt]]]] = {}
    for row, prompt in zip(rows, prompts, strict=True):
        assert prompt.batch is not None
        members.setdefault(id(prompt.batch), (prompt.batch, []))[1].append((row, prompt))
    return list(members.values())
