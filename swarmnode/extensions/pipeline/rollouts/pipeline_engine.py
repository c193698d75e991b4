"""A rollout engine whose model is held in stages: the pipeline samples like one node with a larger policy.

partial_rollouts.py -> [PipelineEngine] -> feeder.py -> chain.py -> the stages, here or at other members

Requests join and leave at every step. Each step is one message around each path in use, for all sequences on
that path. The driving node samples as the other engines do: seeds, log-probabilities, abort and resume are
exact.

The path is part of the policy. A request uses the path that it was sampled on before, or else the one that
`choose_path` returns for its prompt, and reports it in `Sampled.path`. If no node holds a stage any more, the
sequences on it continue along the other stages. Their path is then this shorter one, because their last
tokens were sampled along it.

The weights are at the stages. `set_policy` only names the version that they must have reached, which is the
pipeline's iteration. A feed of another version is refused: `step` then raises EngineError with everything
unchanged, and continues once `set_policy` has named the new version. There is only one policy at a time, so
none can be pinned.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarmnode.errors import ConfigError, EngineError
from swarmnode.extensions.pipeline.rollouts.chain import Chain, Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.feeder import Feeder
from swarmnode.extensions.pipeline.rollouts.routing import ChoosePath
from swarmnode.rollout.decode.running_rows import DecodePolicy
from swarmnode.rollout.decode.torch_engine import LoraPairs, OnePolicyEngine
from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import BASE_VERSION, Capabilities, InFlight, Output, PolicyUpdate, Request
from swarmnode.rollout.request_queue import not_finite


class PipelineEngine(OnePolicyEngine):
    """An `Engine` for a model in stages.

    >>> chain = RemoteChain(node, loop, members, on_lost=print, step_timeout_s=20.0)       # doctest: +SKIP
    >>> engine = PipelineEngine(chain, eos, choose_path=lambda prompt: (0, 1, 2))          # doctest: +SKIP
    """

    def __init__(
        self,
        chain: Chain,
        eos_token_ids: Sequence[int],
        *,
        choose_path: ChoosePath,
        max_running: int = 64,
        max_length: int = 2048,
        newest: Callable[[], int] | None = None,
    ) -> None:
        """`newest`: returns the version of our own stage, which must be 0 without it, and is called before
        every step. Use it if the version may change without `set_policy`; running requests then continue
        under the new version, as with "keep". Raises ConfigError."""
        if max_length > chain.max_feed_tokens:
            raise ConfigError(
                f"sequences of {max_length} tokens, one message through this pipeline has at most "
                f"{chain.max_feed_tokens}",
                hint="shorten rollout.max_tokens or the prompts",
            )
        capabilities = Capabilities(
            name="pipeline",
            inflight=frozenset({"keep", "recompute"}),
            max_versions=1,
            max_running=max_running,
            max_length=max_length,
            exact_resume=True,
        )
        version = 0 if newest is None else newest()
        first = DecodePolicy(version, [], is_base=version == 0)
        super().__init__(capabilities, eos_token_ids, chain.vocabulary, first, chain.device)
        self._chain = chain
        self._newest_version = newest
        self._feeder = Feeder(chain, choose_path)
        self._clock = 0
        self._tokens: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[float]] = {}
        self._fitting = max_running

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        super().set_policy(update, inflight)
        self._feeder.policy_moved()

    # One step

    @property
    def _tick(self) -> int:
        return self._clock

    def _step(self) -> Sequence[Output]:
        version = self._version_now()
        if version != self._newest.version:
            self.set_policy(PolicyUpdate(version, {}, 1.0), "keep")
        self._admit()
        hidden = self._feeder.bring(self._newest.version)
        self._record_paths()
        if isinstance(hidden, Stopped):
            self._handle_stop(hidden)
            return ()
        tokens, logprobs = self._sampler.sample(self._logits_by_row(hidden))
        self._clock += 1
        self._append(tokens.tolist(), logprobs.tolist())
        return self._finish(self._ended(tokens))

    def _version_now(self) -> int:
        return self._newest.version if self._newest_version is None else self._newest_version()

    def _admit(self) -> None:
        """Start waiting requests in free rows."""
        if not self._running:
            self._fitting = self.capabilities.max_running
        requests = [
            self._on_path(request) for request in self._queue.take(self._fitting - len(self._running))
        ]
        free = (row for row in range(self.capabilities.max_running) if row not in self._running)
        rows = [row for row, _ in zip(free, requests, strict=False)]
        if not requests:
            return
        self._start(rows, requests)
        for row, request in zip(rows, requests, strict=True):
            self._tokens[row], self._logprobs[row] = [], []
            self._feeder.add(row, request.prompt_ids, request.sampled.token_ids, request.sampled.path)

    def _on_path(self, request: Request) -> Request:
        route = self._feeder.route_for(request.prompt_ids, request.sampled.path)
        return request.resumed(replace(request.sampled, path=route.stages))

    def _record_paths(self) -> None:
        """Record the path of each sequence, which may have lost a stage."""
        for row, running in self._running.items():
            sampled = running.request.sampled
            if sampled.path != (path := self._feeder.path(row)):
                request = running.request.resumed(replace(sampled, path=path))
                self._running[row] = replace(running, request=request)

    def _handle_stop(self, stopped: Stopped) -> None:
        """Handle a step that was stopped before anything was sampled: put requests back, leave it to the next
        step, or raise EngineError."""
        if stopped.why is StopReason.NOT_FINITE:
            version = self._newest.version
            self._drop_everything()
            raise not_finite(version)
        if stopped.why is StopReason.OTHER_POLICY and self._version_now() != self._newest.version:
            # The pipeline has moved on during the step; the next step uses the new version.
            return
        if stopped.why is StopReason.NO_MEMORY and len(self._running) > 1:
            # The requests that started last wait for room.
            rows = sorted(self._running, key=lambda row: self._running[row].first_tick)
            self._fitting = (len(rows) + 1) // 2
            self._put_back(rows[self._fitting :])
            return
        hint = (
            "lower rollout.max_tokens" if stopped.why is StopReason.NO_MEMORY else "set_policy to what it has"
        )
        raise EngineError(f"node {stopped.node} of the pipeline: {stopped.why}, {stopped.detail}", hint=hint)

    def _logits_by_row(self, hidden: dict[int, Tensor]) -> Tensor:
        """Return logits [rows, vocabulary], with zeros in rows without a sequence."""
        order = list(hidden)
        logits = self._chain.logits(torch.stack([hidden[row] for row in order]))
        count = max(order) + 1
        if order == list(range(count)):
            return logits
        spread = logits.new_zeros(count, logits.shape[1])
        spread[order] = logits
        return spread

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for row in self._running:
            self._tokens[row].append(tokens[row])
            self._logprobs[row].append(logprobs[row])
            self._feeder.append(row, tokens[row])
        self._counters.generated_tokens += len(self._running)

    # Rows

    def _harvest(self, rows: Sequence[int], since: int) -> tuple[list[list[int]], list[list[float]]]:
        before = [self._running[row].first_tick - since for row in rows]
        return (
            [[0] * ticks + self._tokens[row] for ticks, row in zip(before, rows, strict=True)],
            [[0.0] * ticks + self._logprobs[row] for ticks, row in zip(before, rows, strict=True)],
        )

    def _release(self, rows: Sequence[int]) -> None:
        self._feeder.drop(rows)
        for row in rows:
            del self._tokens[row], self._logprobs[row]

    def _clear(self) -> None:
        self._feeder.clear()
        self._tokens.clear()
        self._logprobs.clear()

    # Policies

    def _pairs(self, update: PolicyUpdate) -> LoraPairs:
        if update.tensors:
            raise EngineError(
                "the weights of a pipeline are at its stages and are not brought by a policy update",
                hint="name the version only: PolicyUpdate(version, {}, 1.0)",
            )
        return {}

    def _merge(self, pairs: LoraPairs, former: Layers | None) -> Layers:
        return []

    def _base(self) -> DecodePolicy:
        if self._newest.version != 0:
            raise EngineError(
                f"the stages carry policy {self._newest.version}, so the base cannot be sampled from",
                hint="update to a policy without tensors first",
            )
        return DecodePolicy(BASE_VERSION, [], is_base=True)
