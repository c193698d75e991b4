"""The common part of engines in torch: requests, rows, policy versions and spans, but no arithmetic.

[TorchEngine] <- embedded.py
      ^
[OnePolicyEngine] <- extensions/generate/generate_engine.py | extensions/pipeline/rollouts/pipeline_engine.py
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from sys import maxsize

import torch
from torch import Tensor

from swarmnode.errors import EngineError
from swarmnode.rollout.decode.adapters.adapter import LoraPair
from swarmnode.rollout.decode.running_rows import DecodePolicy, RunningRow, StopTokens
from swarmnode.rollout.decode.sampler import Sampler
from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import (
    BASE_VERSION,
    Capabilities,
    EngineStats,
    InFlight,
    Output,
    PolicyUpdate,
    Request,
    Sampled,
)
from swarmnode.rollout.engine_counters import EngineCounters
from swarmnode.rollout.request_queue import RequestQueue, not_finite, untouched
from swarmnode.types import FinishReason

LoraPairs = Mapping[str, LoraPair]

NEVER = maxsize


class TorchEngine(ABC):
    """The bookkeeping half of an `Engine`."""

    def __init__(
        self,
        capabilities: Capabilities,
        eos_token_ids: Sequence[int],
        vocab: int,
        newest: DecodePolicy,
        device: torch.device,
        prompt_vocab: int | None = None,
    ) -> None:
        """`vocab`: number of tokens that can be sampled. `prompt_vocab`: number that can be read; by default
        the same."""
        rows = capabilities.max_running
        self.capabilities = capabilities
        self._device = device
        self._sampler = Sampler(vocab, rows, device)
        self._stops = StopTokens(eos_token_ids, rows, device)
        self._queue = RequestQueue(capabilities.max_length, prompt_vocab or vocab)
        self._vocab = vocab
        self._counters = EngineCounters()
        self._running: dict[int, RunningRow] = {}
        self._next_deadline = NEVER
        self._newest = newest
        self._policies = {newest.version: newest}
        """By version. The base is among them only while a request samples from it by name."""

    # Provided by the arithmetic half

    @property
    @abstractmethod
    def _tick(self) -> int: ...

    @abstractmethod
    def _step(self) -> Sequence[Output]:
        """Samples one token for every running row, after giving free rows to waiting requests."""

    @abstractmethod
    def _harvest(self, rows: Sequence[int], since: int) -> tuple[list[list[int]], list[list[float]]]:
        """Returns the tokens and log-probabilities that rows sampled from tick `since` on."""

    @abstractmethod
    def _release(self, rows: Sequence[int]) -> None:
        """Frees these rows."""

    @abstractmethod
    def _clear(self) -> None:
        """Frees all rows and their memory."""

    @abstractmethod
    def _line_up(self, requests: Iterable[Request]) -> None:
        """Prepares for these waiting requests."""

    @abstractmethod
    def _leave_line(self, requests: Iterable[Request]) -> None:
        """Drops these requests, which no longer wait and will not start."""

    @abstractmethod
    def _check_versions(self, staying: Iterable[DecodePolicy]) -> None:
        """Raises EngineError unless the engine has room for a new policy in addition to these."""

    @abstractmethod
    def _pairs(self, update: PolicyUpdate) -> LoraPairs:
        """Returns the LoRA of a policy by module. Raises EngineError if it does not fit this model."""

    @abstractmethod
    def _merge(self, pairs: LoraPairs, former: Layers | None) -> Layers:
        """Returns a policy ready for sampling. `former`: layers that are no longer needed."""

    @abstractmethod
    def _base(self) -> DecodePolicy:
        """Returns the model without an adapter. Raises EngineError if it is not available now."""

    @abstractmethod
    def _keep(self, row: int, policy: DecodePolicy, token_ids: Sequence[int]) -> None:
        """Called when a request stops that may go on. Its row has keys and values for all of these tokens
        except the newest, under this policy; they may be kept now."""

    # The Protocol

    @property
    def policy_version(self) -> int:
        return self._newest.version

    def check(self, request: Request) -> None:
        self._queue.check(request, self._live_versions())

    def submit(self, requests: Iterable[Request]) -> None:
        self._line_up(self._queue.submit(requests, self._live_versions()))

    @torch.inference_mode()
    def step(self) -> Sequence[Output]:
        return self._step() if self._queue.in_flight else ()

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        chosen = None if request_ids is None else set(request_ids)
        waiting = self._queue.withdraw(chosen)
        self._leave_line(waiting)
        outputs = self._finish(dict.fromkeys(self._rows_of(chosen), "abort"))
        self._forget_unused()
        return [*outputs, *map(untouched, waiting)]

    @torch.inference_mode()
    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        followers = [row for row, running in self._running.items() if running.request.version is None]
        staying = self._staying(update.version)
        pairs = self._pairs(update)
        self._check_versions(staying)
        with self._counters.swap():
            if inflight == "recompute":
                self._put_back(followers)
            self._take_over(update.version, pairs, staying)
            if inflight == "keep":
                for row in followers:
                    self._running[row] = self._running[row].kept_under(self._newest, self._tick)

    @torch.inference_mode()
    def load(self, update: PolicyUpdate) -> None:
        if update.version in self._policies:
            return
        pairs = self._pairs(update)
        self._check_versions(set(self._policies.values()))
        loaded = DecodePolicy(update.version, self._merge(pairs, None), is_base=not pairs)
        self._policies[update.version] = loaded

    def stats(self) -> EngineStats:
        return self._counters.stats(len(self._running), len(self._queue), self._live_versions())

    @torch.inference_mode()
    def snapshot(self, request_ids: Iterable[str] | None = None) -> tuple[Request, ...]:
        chosen = None if request_ids is None else set(request_ids)
        rows = self._rows_of(chosen)
        running = [
            self._running[row].request.resumed(sampled)
            for row, sampled in zip(rows, self._collect(rows), strict=True)
        ]
        waiting = self._queue.waiting
        return (*running, *(one for one in waiting if chosen is None or one.request_id in chosen))

    def sleep(self) -> Sequence[Output]:
        # The merged weights stay: only keys and values grow with the requests in flight.
        outputs = self.abort()
        self._clear()
        return outputs

    def close(self) -> None:
        self._drop_everything()
        self._newest.layers.clear()

    # Policies

    def _policy(self, version: int | None) -> DecodePolicy:
        """Returns the live policy of this version. None: the newest."""
        if version is None:
            return self._newest
        if version == BASE_VERSION and version not in self._policies:
            self._policies[version] = self._base()
        if (policy := self._policies.get(version)) is None:
            raise EngineError(
                f"policy {version} is not live", hint=f"live are {sorted(self._live_versions())}"
            )
        return policy

    def _live_versions(self) -> set[int]:
        return set(self._policies) - {BASE_VERSION}

    def _staying(self, new_version: int) -> set[DecodePolicy]:
        """Returns the policies, other than the new one, that are still sampled from after an update."""
        running = {one.policy for one in self._running.values() if one.request.version is not None}
        waiting = {request.version for request in self._queue.waiting} - {None, new_version}
        return running | {policy for version, policy in self._policies.items() if version in waiting}

    def _take_over(self, version: int, pairs: LoraPairs, staying: set[DecodePolicy]) -> None:
        former = self._newest.layers
        spare = None if any(policy.layers is former for policy in staying) else former
        self._newest = DecodePolicy(version, self._merge(pairs, spare), is_base=not pairs)
        # If a number was used twice, it now names the later one of those that stay.
        named = {number: policy for number, policy in self._policies.items() if policy in staying}
        self._policies = {policy.version: policy for policy in staying} | named | {version: self._newest}

    def _forget_unused(self) -> None:
        if len(self._policies) == 1:
            return
        used = {self._newest, *(running.policy for running in self._running.values())}
        waiting = {request.version for request in self._queue.waiting}
        self._policies = {
            version: policy
            for version, policy in self._policies.items()
            if policy in used or version in waiting
        }

    # Rows

    def _rows_of(self, chosen: set[str] | None) -> list[int]:
        """Returns the rows of these requests. None: all."""
        rows = self._running.items()
        return [row for row, one in rows if chosen is None or one.request.request_id in chosen]

    def _start(
        self, rows: Sequence[int], requests: Sequence[Request], kept_tokens: Sequence[int] | None = None
    ) -> None:
        """Starts rows whose first token is sampled next. `kept_tokens`: for each, the number that need not be
        computed."""
        kept = [0] * len(requests) if kept_tokens is None else kept_tokens
        index = torch.tensor(rows, device=self._device)
        sampling = [request.sampling for request in requests]
        positions = [len(request.prompt_ids) + len(request.sampled) for request in requests]
        self._sampler.write(index, sampling, positions)
        self._stops.write(index, sampling)
        for row, request, found in zip(rows, requests, kept, strict=True):
            own_kept = found if request.sampled else 0
            self._counters.started(request, own_kept)
            policy = self._policy(request.version)
            self._running[row] = running = RunningRow(request, policy, self._tick + 1, own_kept)
            self._next_deadline = min(self._next_deadline, running.last_tick)

    def _ended(self, tokens: Tensor) -> dict[int, FinishReason]:
        """Returns the rows that the newest tokens ended, with the reason."""
        ended: dict[int, FinishReason] = {
            row: "stop" for row in self._stops.hit(tokens) if row in self._running
        }
        if self._tick >= self._next_deadline:
            for row, running in self._running.items():
                if running.last_tick <= self._tick:
                    ended.setdefault(row, "length")
            left = (running.last_tick for row, running in self._running.items() if row not in ended)
            self._next_deadline = min(left, default=NEVER)
        return ended

    def _finish(self, ended: Mapping[int, FinishReason]) -> list[Output]:
        """Releases these rows and returns their outputs."""
        if not ended:
            return []
        sampled = self._collect(list(ended))
        outputs: list[Output] = []
        for (row, reason), completion in zip(ended.items(), sampled, strict=True):
            running = self._running.pop(row)
            request = running.request
            self._queue.close(request.request_id)
            outputs.append(Output(request.request_id, completion, reason, running.kept_tokens))
            # Stale keys would make the next turn stale as well, although it can be fresh.
            if request.goes_on and reason == "stop" and running.kv == "fresh":
                self._keep(row, running.policy, request.prompt_ids + completion.token_ids)
        self._vacate(list(ended))
        return outputs

    def _put_back(self, rows: Sequence[int]) -> None:
        """Releases these rows; their requests wait before all others and continue where they stopped."""
        if not rows:
            return
        sampled = self._collect(rows)
        requests = [
            self._running.pop(row).request.resumed(completion)
            for row, completion in zip(rows, sampled, strict=True)
        ]
        self._vacate(rows)
        self._queue.put_first(requests)
        self._line_up(requests)

    def _vacate(self, rows: Sequence[int]) -> None:
        self._release(rows)
        if not self._running:
            self._sampler.reset()
            self._next_deadline = NEVER
        self._forget_unused()

    def _collect(self, rows: Sequence[int]) -> list[Sampled]:
        """Returns the completions of these rows so far, including the tokens they were resumed with."""
        if not rows:
            return []
        chosen = [self._running[row] for row in rows]
        since = min(running.first_tick for running in chosen)
        collected: list[Sampled] = []
        for running, tokens, logprobs in zip(chosen, *self._harvest(rows, since), strict=True):
            own = slice(running.first_tick - since, None)
            if not math.isfinite(sum(logprobs[own])):
                self._drop_everything()
                raise not_finite(running.policy.version)
            spans = running.spans(self._tick)
            collected.append(running.request.sampled.extended(tokens[own], logprobs[own], spans))
        return collected

    def _drop_everything(self) -> None:
        self._leave_line(self._queue.withdraw(None))
        for running in self._running.values():
            self._queue.close(running.request.request_id)
        self._running.clear()
        self._sampler.reset()
        self._next_deadline = NEVER
        self._clear()
        self._forget_unused()


class OnePolicyEngine(TorchEngine):
    """A torch engine with one policy at a time. It prepares nothing for requests that wait, and keeps nothing
    of those that stop."""

    def submit(self, requests: Iterable[Request]) -> None:
        asked = list(requests)
        if any(request.version == BASE_VERSION for request in asked):
            # In use from now on, so that no update can take it away before these have started.
            self._policy(BASE_VERSION)
        super().submit(asked)

    def _line_up(self, requests: Iterable[Request]) -> None:
        pass

    def _leave_line(self, requests: Iterable[Request]) -> None:
        pass

    def _keep(self, row: int, policy: DecodePolicy, token_ids: Sequence[int]) -> None:
        pass

    def _check_versions(self, staying: Iterable[DecodePolicy]) -> None:
        for policy in staying:
            raise EngineError(
                f"a request in flight stays on policy {policy.version}, but the {self.capabilities.name}"
                " engine has one at a time",
                hint="let it finish or abort it, then update",
            )
