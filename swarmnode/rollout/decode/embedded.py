"""The built-in engine: our own continuous decode loop over a transformers model, on a CPU or any GPU.

schedule/partial_rollouts.py -> submit -> torch_engine.py -> [EmbeddedEngine] -> Output
                                                           |
           prompt_store.py (new prompts) -> slots.py <-----+--> decoder.py -> sampler.py     (one step)
                ^                              |
                +--------- kv_reuse.py <-------+   (conversations, when a turn ends)

One `step` decodes all running rows together, whatever their policies, gives free rows to waiting requests
(their prompts are computed separately, so they join for sampling), and samples one token for every row.

A conversation comes turn by turn, each one after everything before it. Its keys and values are kept when a
turn ends (kv_reuse.py), so that the next turn only computes what is new.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import EngineError
from swarmnode.rollout.decode.adapters.policy_mix import PolicyMix
from swarmnode.rollout.decode.cached_attention import Scratch, cache_attention
from swarmnode.rollout.decode.decoder import Attention, Decoder, Lookback
from swarmnode.rollout.decode.prompts.kv_reuse import KEPT_TOKENS, KeptStore
from swarmnode.rollout.decode.prompts.prompt_store import (
    PromptBatch,
    PromptStore,
    StoredPrompt,
)
from swarmnode.rollout.decode.running_rows import DecodePolicy
from swarmnode.rollout.decode.slots import Slots
from swarmnode.rollout.decode.torch_engine import LoraPairs, TorchEngine
from swarmnode.rollout.decode.weights import FusedWeights, Layers, longest_sequence
from swarmnode.rollout.engine import BASE_VERSION, Capabilities, Output, PolicyUpdate, Request

DENSE_SHARE = 0.75
"""Share of living rows below which they are moved together, if no request waits."""


class EmbeddedEngine(TorchEngine):
    """An `Engine` for dense models of the families in family.py.

    Results do not depend on the rest of the batch, up to the rounding of float sums of other shapes.

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
    ) -> None:
        """`max_length` bounds prompt and completion together; by default it is the length the model was made
        for. Each of `max_versions` live policies holds a copy of the model's layers. Kept keys and values are
        bounded by what all rows could hold."""
        place = torch.device(device) if device is not None else model.device
        weights = FusedWeights(model, place)
        capabilities = Capabilities(
            name="embedded",
            inflight=frozenset({"keep", "recompute"}),
            max_versions=max_versions,
            max_running=max_slots,
            max_length=longest_sequence(model) if max_length is None else max_length,
            exact_resume=True,
        )
        start = DecodePolicy(0, weights.merged({}), is_base=True)
        super().__init__(capabilities, eos_token_ids, weights.shape.vocab, start, place)
        self._weights = weights
        self._decoder = Decoder(weights)
        self._most_kept = min(KEPT_TOKENS, max_slots * capabilities.max_length)
        self._prompts = PromptStore(self._decoder, KeptStore(self._most_kept))
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
        mixed = [self._running[row].policy.layers for row in slots.rows_in_order]
        return PolicyMix.of(mixed, self._device).forward(decoder, tokens, attention)

    def _admit(self, decoded: Tensor | None) -> Tensor:
        """Gives free rows to waiting requests. Returns the hidden states of all rows, including the new
        ones."""
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

    def _computed(self, requests: Iterable[Request]) -> list[StoredPrompt]:
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
        self._prompts.kept.add(policy, token_ids, self._slots.cache_of(row))

    def _clear(self) -> None:
        self._prompts.kept = KeptStore(self._most_kept)
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
                f"{live} policy versions would be live; this engine holds {self.capabilities.max_versions}",
                hint='let the oldest requests finish first, or update with "keep"',
            )

    def _merge(self, pairs: LoraPairs, former: Layers | None) -> Layers:
        self._prompts.forget()
        return self._weights.merged(pairs, former)

    def _take_over(self, version: int, pairs: LoraPairs, staying: set[DecodePolicy]) -> None:
        super()._take_over(version, pairs, staying)
        self._prompts.kept.forget_others(self._policies.values())

    def _forget_unused(self) -> None:
        super()._forget_unused()
        self._prompts.kept.forget_others(self._policies.values())

    def _base(self) -> DecodePolicy:
        bare = next((policy for policy in self._policies.values() if policy.is_base), None)
        layers = self._weights.merged({}) if bare is None else bare.layers
        return DecodePolicy(BASE_VERSION, layers, is_base=True)


def _by_batch(
    rows: Sequence[int], prompts: Sequence[StoredPrompt]
) -> list[tuple[PromptBatch, list[tuple[int, StoredPrompt]]]]:
    """Groups the new rows by the batch that computed their prompts."""
    members: dict[int, tuple[PromptBatch, list[tuple[int, StoredPrompt]]]] = {}
    for row, prompt in zip(rows, prompts, strict=True):
        assert prompt.batch is not None
        members.setdefault(id(prompt.batch), (prompt.batch, []))[1].append((row, prompt))
    return list(members.values())
