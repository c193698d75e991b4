"""The built-in engine: our own decode loop over a transformers model, continuous, on a CPU or any GPU.

collector.py -> submit -> requests.py -> [embedded] -> Output
                                             |
     prefill.py (new prompts) -> slots.py <--+--> decoder.py -> sampler.py     (one step)

One `step` decodes all running rows together, lets waiting requests take the free rows (their prompts are
computed apart, so they join when it samples), and samples one token for everybody.
"""

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import EngineError
from swarmnode.rollout.attention import CacheAttention
from swarmnode.rollout.decoder import Decoder
from swarmnode.rollout.engine import EngineStats, Output, PolicyUpdate, Request
from swarmnode.rollout.prefill import Prompt, PromptBatch, PromptStore
from swarmnode.rollout.requests import RequestQueue, untouched
from swarmnode.rollout.sampler import Sampler
from swarmnode.rollout.slots import Slots
from swarmnode.rollout.stops import StopTokens
from swarmnode.rollout.weights import FusedWeights
from swarmnode.types import FinishReason

DENSE_SHARE = 0.75
"""When nobody waits and fewer than this share of the rows is alive, the living are moved together."""

NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class _Running:
    """A request that has a row."""

    request: Request
    first_tick: int
    """When its first token is sampled."""

    @property
    def last_tick(self) -> int:
        """When its token budget is used up."""
        return self.first_tick + self.request.sampling.max_tokens - 1


class EmbeddedEngine:
    """An `Engine` for dense Llama, Qwen2 and Qwen3 models.

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
    ) -> None:
        """`max_length` bounds prompt and completion together; by default what the model was made for."""
        place = torch.device(device) if device is not None else model.device
        weights = FusedWeights(model, place)
        dtype = weights.embedding.dtype
        self._device = place
        self._weights = weights
        self._decoder = Decoder(weights)
        self._prompts = PromptStore(self._decoder, dtype, place)
        self._slots = Slots(weights.shape, max_slots, dtype, place)
        self._sampler = Sampler(weights.shape.vocab, max_slots, place)
        self._queue = RequestQueue(
            model.config.max_position_embeddings if max_length is None else max_length, weights.shape.vocab
        )
        self._running: dict[int, _Running] = {}
        self._stops = StopTokens(eos_token_ids, max_slots, place)
        self._next_deadline = NEVER
        self._longest = 0
        self._policy_version = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._generation_s = 0.0

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def submit(self, requests: Iterable[Request]) -> None:
        for request in self._queue.submit(requests):
            self._prompts.expect(request.prompt_ids)
            self._longest = max(self._longest, len(request.prompt_ids) + request.sampling.max_tokens)

    @torch.inference_mode()
    def step(self) -> Sequence[Output]:
        if not self._queue.in_flight:
            return ()
        started = time.perf_counter()
        self._decoder.reserve(self._longest)
        hidden = self._admit(self._decode())
        tokens, logprobs = self._sampler.sample(self._decoder.logits(hidden))
        self._slots.append(tokens, logprobs)
        self._generated_tokens += self._slots.alive
        outputs = self._finish(self._ended(tokens))
        self._close_up()
        self._generation_s += time.perf_counter() - started
        return outputs

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        chosen = None if request_ids is None else set(request_ids)
        waiting = self._queue.withdraw(chosen)
        for request in waiting:
            self._prompts.leave(request.prompt_ids)
        rows: dict[int, FinishReason] = {
            row: "abort"
            for row, running in self._running.items()
            if chosen is None or running.request.request_id in chosen
        }
        outputs = self._finish(rows)
        self._close_up()
        return [*outputs, *(untouched(request, self._policy_version) for request in waiting)]

    def set_policy(self, update: PolicyUpdate) -> None:
        self._queue.refuse_update(update)
        self._weights.load(update)
        self._policy_version = update.version

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._queue),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            generation_s=self._generation_s,
        )

    # One step

    def _decode(self) -> Tensor | None:
        """Hidden states [rows, hidden] of the newest tokens; None when nothing runs."""
        if not self._running:
            return None
        slots = self._slots
        attention = CacheAttention(self._weights.shape, slots)
        return self._decoder.forward(slots.newest_tokens(), slots.positions(self._longest), attention)

    def _admit(self, hidden: Tensor | None) -> Tensor:
        """Give free rows to waiting requests. Returns the hidden states of all rows, theirs included."""
        requests = self._queue.take(self._slots.free)
        if not requests:
            assert hidden is not None
            return hidden
        prompts = [self._prompts.leave(request.prompt_ids) for request in requests]
        self._prompts.compute(prompts)
        rows = self._slots.claim(len(requests))
        merged = self._weights.embedding.new_zeros(self._slots.rows, self._weights.shape.hidden)
        if hidden is not None:
            merged[: len(hidden)] = hidden
        for batch, members in _by_batch(rows, prompts):
            places = torch.tensor([prompt.place for _, prompt in members], device=self._device)
            own_rows = [row for row, _ in members]
            lengths = [len(prompt.ids) for _, prompt in members]
            self._slots.place(own_rows, lengths, batch.cache.index_select(1, places))
            merged[own_rows] = batch.hidden.index_select(0, places)
        self._start(rows, requests)
        return merged

    def _start(self, rows: list[int], requests: list[Request]) -> None:
        index = torch.tensor(rows, device=self._device)
        sampling = [request.sampling for request in requests]
        self._sampler.write(index, sampling, [len(request.prompt_ids) for request in requests])
        self._stops.write(index, sampling)
        for row, request in zip(rows, requests, strict=True):
            self._running[row] = running = _Running(request, self._slots.tick + 1)
            self._next_deadline = min(self._next_deadline, running.last_tick)
            self._prompt_tokens += len(request.prompt_ids)

    def _ended(self, tokens: Tensor) -> dict[int, FinishReason]:
        ended: dict[int, FinishReason] = {
            row: "stop" for row in self._stops.hit(tokens) if row in self._running
        }
        if self._slots.tick >= self._next_deadline:
            for row, running in self._running.items():
                if running.last_tick <= self._slots.tick:
                    ended.setdefault(row, "length")
            left = (running.last_tick for row, running in self._running.items() if row not in ended)
            self._next_deadline = min(left, default=NEVER)
        return ended

    def _finish(self, ended: Mapping[int, FinishReason]) -> list[Output]:
        """Collect what these rows sampled and let them go."""
        if not ended:
            return []
        rows = list(ended)
        first_ticks = [self._running[row].first_tick for row in rows]
        since = min(first_ticks)
        columns = zip(rows, first_ticks, *self._slots.harvest(rows, since), strict=True)
        outputs = [
            self._output(
                self._running[row].request, tokens[first - since :], logprobs[first - since :], ended[row]
            )
            for row, first, tokens, logprobs in columns
        ]
        self._slots.release(rows)
        for row in rows:
            self._queue.close(self._running.pop(row).request.request_id)
        if not self._running:
            self._sampler.reset()
            self._next_deadline = NEVER
        return outputs

    def _output(
        self, request: Request, tokens: list[int], logprobs: list[float], finish: FinishReason
    ) -> Output:
        if not math.isfinite(sum(logprobs)):
            self._drop_everything()
            raise EngineError(
                f"policy {self._policy_version} gives NaN as probabilities; all requests are dropped",
                hint="move the newest checkpoint away, start again, and lower the learning rate",
            )
        return Output(request.request_id, tuple(tokens), tuple(logprobs), self._policy_version, finish)

    def _drop_everything(self) -> None:
        for request in self._queue.withdraw(None):
            self._prompts.leave(request.prompt_ids)
        for running in self._running.values():
            self._queue.close(running.request.request_id)
        self._running.clear()
        self._slots.scrub()
        self._sampler.reset()
        self._next_deadline = NEVER

    def _close_up(self) -> None:
        alive = len(self._running)
        if not alive or len(self._queue) or alive >= DENSE_SHARE * self._slots.rows:
            return
        kept = self._slots.close_up()
        index = torch.tensor(kept, device=self._device)
        self._sampler.keep(index)
        self._stops.keep(index)
        self._running = {row: self._running[former] for row, former in enumerate(kept)}


def _by_batch(
    rows: Sequence[int], prompts: Sequence[Prompt]
) -> list[tuple[PromptBatch, list[tuple[int, Prompt]]]]:
    """The newcomers by the batch that computed them, widest first: the slots then make room only once."""
    members: dict[int, tuple[PromptBatch, list[tuple[int, Prompt]]]] = {}
    for row, prompt in zip(rows, prompts, strict=True):
        assert prompt.batch is not None
        members.setdefault(id(prompt.batch), (prompt.batch, []))[1].append((row, prompt))
    return sorted(members.values(), key=lambda member: -member[0].cache.shape[3])
