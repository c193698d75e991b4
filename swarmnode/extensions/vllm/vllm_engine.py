"""vLLM as a rollout engine: in this process on a CPU, in a separate process on CUDA.

schedule/partial_rollouts.py -> submit -> request_queue.py -> [engine] -> Output
                                          |
      vllm_policies.py (whose weights) <--+--> vllm_driver.py (Driver: vLLM itself)

Requests wait here instead of in vLLM, which holds at most as many as can run. So no waiting request has to be
changed when there is a new policy, and the queue is the same as in every other engine.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from swarmnode.extensions.vllm.inprocess import InProcessDriver
from swarmnode.extensions.vllm.separate import SeparateDriver
from swarmnode.extensions.vllm.starting import (
    Weights,
    capabilities,
    computes_on_cpu,
    kv_room,
    lora_modules,
    placement,
    start_policies,
)
from swarmnode.extensions.vllm.vllm_driver import Delta, DriverSettings, EngineDtype
from swarmnode.extensions.vllm.vllm_limits import (
    refuse_base,
    refuse_model,
    refuse_temperatures,
    refuse_versions,
)
from swarmnode.extensions.vllm.vllm_policies import LoadedPolicy
from swarmnode.extensions.vllm.vllm_rows import Row, core_request
from swarmnode.rollout.decode.weights import longest_sequence
from swarmnode.rollout.engine import (
    BASE_VERSION,
    EngineStats,
    InFlight,
    Output,
    PolicyUpdate,
    Request,
    Sampled,
)
from swarmnode.rollout.engine_counters import EngineCounters
from swarmnode.rollout.request_queue import (
    RequestQueue,
    not_finite,
    untouched,
)


class VllmEngine:
    """An `Engine` over vLLM, for every model that vLLM runs.

    >>> engine = VllmEngine("Qwen/Qwen3-0.6B", model, (0,), lora_rank=16, dtype="bfloat16")  # doctest: +SKIP
    >>> engine.submit([Request("a", (1, 2, 3), SamplingParams(max_tokens=8, seed=0))])       # doctest: +SKIP
    >>> while not (outputs := engine.step()): ...                                            # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        base: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_slots: int = 256,
        max_length: int | None = None,
        *,
        lora_rank: int,
        dtype: EngineDtype,
        weights: Weights = "auto",
        max_versions: int = 4,
        kv_bytes: int | None = None,
        in_process: bool | None = None,
        card: int | None = None,
    ) -> None:
        """`model`: the model that vLLM loads. `base`: the same model for training, which is only read.

        `kv_bytes`: room for keys and values; by default, as much as fits. `in_process`: run in this process
        (default on a CPU) or in a separate one. `card`: CUDA's number of the card; None: the first.
        """
        on_cpu = computes_on_cpu()
        refuse_model(base, on_cpu)
        merged, beside = placement(weights, in_process, on_cpu)
        settings = DriverSettings(
            model=model,
            dtype=dtype,
            max_slots=max_slots,
            max_length=longest_sequence(base) if max_length is None else max_length,
            lora_modules=() if merged else lora_modules(base),
            lora_rank=lora_rank,
            # One for followers of the newest version, and the others for requests that asked for a version.
            lora_slots=max_versions + 1,
            kv_bytes=kv_bytes,
            card=None if on_cpu else card,
        )
        if on_cpu and kv_bytes is None:
            settings = replace(settings, kv_bytes=kv_room(base, settings))
        self._driver = SeparateDriver(settings) if beside else InProcessDriver(settings)
        self._policies = start_policies(self._driver, base, settings, merged, max_versions)
        self.capabilities = capabilities(self._policies, settings)
        self._eos = tuple(eos_token_ids)
        self._vocab = base.config.get_text_config().vocab_size
        self._queue = RequestQueue(settings.max_length, self._vocab)
        self._running: dict[str, Row] = {}
        self._ready: list[Output] = []
        self._started = 0
        self._asleep = False
        self._counters = EngineCounters()

    @property
    def policy_version(self) -> int:
        return self._policies.newest.version

    def check(self, request: Request) -> None:
        self._refuse_requests([request])
        self._queue.check(request, self._live_versions())

    def submit(self, requests: Iterable[Request]) -> None:
        accepted = list(requests)
        self._refuse_requests(accepted)
        self._queue.submit(accepted, self._live_versions())
        self._wake()

    def step(self) -> Sequence[Output]:
        if not self._queue.in_flight:
            return ()
        self._feed()
        if self._running:
            self._absorb(self._driver.step())
        return self._hand_out(None)

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        """Aborts as every engine does. A vLLM in another process keeps sampling until it gets the abort, so a
        completion may turn out to have ended by itself (finish "stop" or "length")."""
        chosen = None if request_ids is None else set(request_ids)
        waiting = self._queue.withdraw(chosen)
        aborted = self._abort_rows(lambda row: chosen is None or row.request.request_id in chosen)
        return [*self._hand_out(chosen), *aborted, *map(untouched, waiting)]

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        policy = self._policies.check(update)
        self._refuse(policy)
        self._wake()
        with self._counters.swap(), self._driver.standstill() as deltas:
            self._absorb(deltas)
            # A row without tokens has nothing to keep, so its prompt is computed under the new policy.
            self._restart(lambda row: row.follows and (inflight == "recompute" or not row.tokens))
            self._policies.adopt(policy, self._asked())
            self._move_followers(policy)

    def load(self, update: PolicyUpdate) -> None:
        if update.version in self._live_versions():
            return
        policy = self._policies.check(update)
        staying = [self._policies.newest, *(row.policy for row in self._running.values())]
        refuse_versions(staying, self._asked(), policy.version, self.capabilities.max_versions)
        self._policies.hold(policy)

    def stats(self) -> EngineStats:
        running = len(self._running) + len(self._ready)
        stats = self._counters.stats(running, len(self._queue), self._live_versions())
        return replace(stats, kv_use=self._driver.kv_use())

    def snapshot(self, request_ids: Iterable[str] | None = None) -> tuple[Request, ...]:
        chosen = None if request_ids is None else set(request_ids)
        rows = [row for row in self._running.values() if chosen is None or row.request.request_id in chosen]
        running = (row.request.resumed(s) for row, s in zip(rows, self._sampled(rows), strict=True))
        waiting = self._queue.waiting
        return (*running, *(one for one in waiting if chosen is None or one.request_id in chosen))

    def sleep(self) -> Sequence[Output]:
        outputs = self.abort()
        if not self._asleep:
            self._driver.sleep()
            self._asleep = True
        return outputs

    def close(self) -> None:
        self._driver.close()

    # Starting and ending

    def _feed(self) -> None:
        requests = self._queue.take(self.capabilities.max_running - len(self._running))
        if requests:
            self._driver.start([core_request(self._enter(request), self._eos) for request in requests])

    def _enter(self, request: Request) -> Row:
        self._started += 1
        lane = self._policies.enter(request.version)
        row = Row(request, str(self._started), lane, lane.policy)
        self._running[row.key] = row
        return row

    def _absorb(self, deltas: Iterable[Delta]) -> None:
        for key, token_ids, logprobs, finish, cached_tokens in deltas:
            row = self._running[key]
            if cached_tokens is not None:
                row.kept_tokens = cached_tokens if row.request.sampled else 0
                self._counters.started(row.request, row.kept_tokens)
            row.tokens += token_ids
            row.logprobs += logprobs
            self._counters.generated_tokens += len(token_ids)
            if finish is not None and finish != "abort":
                self._let_go(row)
                [sampled] = self._sampled([row])
                self._ready.append(Output(row.request.request_id, sampled, finish, row.kept_tokens))

    def _withdraw(self, choose: Callable[[Row], bool]) -> list[Row]:
        """Removes rows from vLLM, with all their tokens. Some may turn out to have ended."""
        rows = {row.key: row for row in self._running.values() if choose(row)}
        if rows:
            self._absorb(self._driver.abort(rows))
        left = [row for key, row in rows.items() if key in self._running]
        for row in left:
            self._let_go(row)
        return left

    def _abort_rows(self, choose: Callable[[Row], bool]) -> list[Output]:
        rows = self._withdraw(choose)
        outputs = [
            Output(row.request.request_id, sampled, "abort", row.kept_tokens)
            for row, sampled in zip(rows, self._sampled(rows), strict=True)
        ]
        for output in outputs:
            self._queue.close(output.request_id)
        return outputs

    def _restart(self, choose: Callable[[Row], bool]) -> None:
        rows = self._withdraw(choose)
        sampled = self._sampled(rows)
        self._queue.put_first([row.request.resumed(s) for row, s in zip(rows, sampled, strict=True)])

    def _move_followers(self, policy: LoadedPolicy) -> None:
        for row in self._running.values():
            if row.follows:
                row.move_to(policy)

    def _let_go(self, row: Row) -> None:
        del self._running[row.key]
        self._policies.leave(row.lane)

    def _hand_out(self, chosen: Collection[str] | None) -> list[Output]:
        outputs = [output for output in self._ready if chosen is None or output.request_id in chosen]
        self._ready = [] if chosen is None else [o for o in self._ready if o.request_id not in chosen]
        for output in outputs:
            self._queue.close(output.request_id)
        return outputs

    def _sampled(self, rows: Collection[Row]) -> list[Sampled]:
        """Returns the rows' completions so far. Raises EngineError if a log-probability is not finite."""
        for row in rows:
            if not math.isfinite(sum(row.logprobs)):
                self._drop_everything(rows)
                raise not_finite(row.policy.version)
        return [row.sampled() for row in rows]

    def _drop_everything(self, withdrawn: Iterable[Row]) -> None:
        self._driver.abort(set(self._running))
        for row in (*withdrawn, *self._running.values()):
            self._queue.close(row.request.request_id)
        for row in list(self._running.values()):
            self._let_go(row)
        self._queue.withdraw(None)
        self._hand_out(None)
        self._driver.scrub()

    def _wake(self) -> None:
        if self._asleep:
            self._driver.wake()
            self._asleep = False

    def _live_versions(self) -> Collection[int]:
        return self._policies.live(self._asked())

    def _asked(self) -> set[int]:
        """Returns the versions that waiting requests ask for and that must stay live for them."""
        versions = {request.version for request in self._queue.waiting}
        return {version for version in versions if version is not None and version != BASE_VERSION}

    def _refuse_requests(self, requests: Sequence[Request]) -> None:
        refuse_temperatures(requests)
        if not self._policies.has_base(self._policies.newest):
            refuse_base(request.version for request in requests)

    def _refuse(self, policy: LoadedPolicy) -> None:
        rows = self._running.values()
        if not self._policies.has_base(policy):
            refuse_base(request.version for request in (*(row.request for row in rows), *self._queue.waiting))
        staying = [row.policy for row in rows if not row.follows]
        refuse_versions(staying, self._asked(), policy.version, self.capabilities.max_versions)
