"""A shortcut through vLLM's scheduler for steps that only decode, i.e. add one token to every running row."""

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutputs

from swarmnode.extensions.vllm.vllm_driver import Delta, finish_reason


class DecodingScheduler(Scheduler):
    """vLLM's scheduler, with `Delta` instead of `EngineCoreOutput` for the rows of a decoding step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._knows_all = _knows_all(self)
        self._decoding: Any = None  # output of the last `schedule`, if that was a decoding step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._decoding = self._decode() if self._may_decode() else None
        return super().schedule(throttle_prefills) if self._decoding is None else self._decoding

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if scheduler_output is not self._decoding:
            return super().update_from_output(scheduler_output, model_runner_output)
        deltas: Any = self._decoded(model_runner_output)
        return {0: EngineCoreOutputs(outputs=deltas)}

    def _may_decode(self) -> bool:
        return (
            self._knows_all
            and self._pause_state is PauseState.UNPAUSED
            and 0 < len(self.running) <= self.max_num_scheduled_tokens
            and not self.waiting
            and not self.kv_holding_waiting
        )

    def _decode(self) -> Any:
        """Returns the plan of a step that advances each running row by one token. Returns None, with nothing
        changed, if a row needs more than that, or blocks that are not free."""
        size, before = self.block_size, self.prev_step_scheduled_req_ids
        computed: list[int] = []
        at_edge: list[int] = []
        opening = 0
        for index, row in enumerate(self.running):
            done = row.num_computed_tokens
            if len(row._all_token_ids) != done + 1 or row.request_id not in before:
                return None
            place = done % size
            if place == 0 or place == size - 1:
                at_edge.append(index)
                opening += place == 0
            computed.append(done)
        if opening > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        blocks: list[Any] = [None] * len(computed)
        for index in at_edge:
            # Opens a block for the next token, or shares the one that it fills with other prompts.
            opened: Any = self.kv_cache_manager.allocate_slots(self.running[index], 1)
            blocks[index] = opened.get_block_ids(allow_none=True)
        return self._plan(computed, blocks)

    def _plan(self, computed: list[int], blocks: list[Any]) -> Any:
        names = [row.request_id for row in self.running]
        produced = [len(row._output_token_ids) for row in self.running]
        for row in self.running:
            row.num_computed_tokens += 1
            row.num_in_flight_tokens += 1
            row.is_prefill_chunk = False
        self.prev_step_scheduled_req_ids = set(names)
        plan = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=computed,
                num_output_tokens=produced,
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=0,
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return plan

    def _decoded(self, output: Any) -> list[Delta]:
        size, longest = self.hash_block_size, self.max_model_len
        tokens, places = output.sampled_token_ids, output.req_id_to_index
        logprobs = None if output.logprobs is None else output.logprobs.logprobs[:, 0].tolist()
        deltas: list[Delta] = []
        ended: list[Any] = []
        rows: list[Any] = self.running
        for row in rows:
            place = places[row.request_id]
            [token] = tokens[place]
            known, sampled = row._all_token_ids, row._output_token_ids
            row.num_in_flight_tokens -= 1
            known.append(token)
            sampled.append(token)
            if len(known) % size == 0:
                row.update_block_hashes()
            finish = None
            if (
                len(sampled) >= row.max_tokens
                or token in row.sampling_params.stop_token_ids
                or len(known) >= longest
            ):
                check_stop(row, longest)
                finish = finish_reason(str(row.get_finished_reason()))
                ended.append(row)
            said = [] if logprobs is None else [logprobs[place]]
            deltas.append(Delta(row.request_id, tokens[place], said, finish, None))
        for row in ended:
            self._free_request(row)
        if ended:
            self.running = [row for row in rows if not row.is_finished()]
        return deltas


def _knows_all(scheduler: Scheduler) -> bool:
    """Returns True if the model samples text with one kind of attention, one step after the other; vLLM
    itself chooses the last by the device. (`engine_arguments` enables nothing else, and `core_request` uses
    no end-of-sequence token, grammar, repetition check or minimum length.)"""
    model = scheduler.vllm_config.model_config
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return (
        [type(manager) for manager in managers] == [FullAttentionManager]
        and managers[0].block_size == scheduler.block_size == scheduler.hash_block_size
        and scheduler.vllm_config.max_concurrent_batches == 1
        and not model.supports_multimodal_inputs
        and model.runner_type == "generate"
        and not scheduler.is_encoder_decoder
        and not scheduler.use_v2_model_runner
    )
