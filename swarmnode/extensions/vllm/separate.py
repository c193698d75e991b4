"""vLLM in a process of its own, which samples on while we do other things: the engine for CUDA.

vllm_engine.py -> vllm_driver.py (Start) -> [separate] -> AsyncLLM (event loop in a thread) -> Delta

`AsyncLLM` lives on the event loop of one background thread; the engine's thread hands it coroutines and takes
what they bring from one queue.
"""

import asyncio
import gc
import queue
import threading
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from swarmnode.errors import EngineError
from swarmnode.extensions.vllm.compat import (
    deaf_to_the_terminal,
    require_vllm,
    runs_on_cpu,
    starting_vllm,
)
from swarmnode.extensions.vllm.vllm_driver import (
    Delta,
    DriverSettings,
    Start,
    engine_arguments,
    finish_reason,
    lora_request,
    starting_model,
    vllm_sampling,
)

T = TypeVar("T")

CALL_TIMEOUT_S = 600.0
"""Longest call to vLLM in seconds: loading weights of a large model, waking up."""

STEP_TIMEOUT_S = 600.0
"""Longest wait for a token of any sequence, in seconds."""

END_TIMEOUT_S = 4.0
"""Seconds for vLLM's process to end by itself before it is killed: a node that is told to stop has ten."""

SETTLE_TURNS = 64
"""Turns of the event loop within which everything that vLLM's process has sent reaches our queue: it passes
four tasks, each of which waits only for the one before it."""


class AsyncDriver:
    """A `Driver` for CUDA."""

    def __init__(self, settings: DriverSettings) -> None:
        require_vllm()
        self._heard: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._unheard: list[Delta] = []
        self._fault: EngineError | None = None
        self._engine: Any = None
        self._tasks = asyncio.TaskGroup()
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        with starting_vllm(in_process=False, card=settings.card), starting_model(settings.model):
            opened: Future[None] = Future()
            self._served = asyncio.run_coroutine_threadsafe(self._serve(settings, opened), self._loop)
            wait([opened, self._served], CALL_TIMEOUT_S, FIRST_COMPLETED)
            if not opened.done():
                self._stop_loop()
                self._served.result(0)

    def start(self, starts: Sequence[Start]) -> None:
        self._call(self._start(starts))

    def step(self) -> list[Delta]:
        self._listen()
        if not self._unheard:
            try:
                self._hear(self._heard.get(timeout=STEP_TIMEOUT_S))
            except queue.Empty:
                raise EngineError(
                    f"vLLM sampled nothing for {STEP_TIMEOUT_S:.0f} s", hint="look at its log"
                ) from None
            self._listen()
        heard, self._unheard = self._unheard, []
        return heard

    def abort(self, keys: Collection[str]) -> list[Delta]:
        self._call(self._abort(list(keys)))
        self._listen()
        theirs = [delta for delta in self._unheard if delta.key in keys]
        self._unheard = [delta for delta in self._unheard if delta.key not in keys]
        return theirs

    @contextmanager
    def standstill(self) -> Iterator[list[Delta]]:
        self._call(self._pause())
        self._listen()
        heard, self._unheard = self._unheard, []
        try:
            yield heard
        finally:
            self._call(self._engine.resume_generation())

    def load_adapter(self, adapter: int, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        self._call(self._engine.add_lora(LoRARequest(str(adapter), adapter, str(folder), load_inplace=True)))

    def drop_adapter(self, adapter: int) -> None:
        self._call(self._engine.remove_lora(adapter))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise EngineError("merged weights need vLLM in this process", hint='use weights="lora"')

    def scrub(self) -> None:
        self._call(self._engine.reset_prefix_cache())
        self._call(self._engine.collective_rpc("scrub_keys_and_values"))

    def kv_use(self) -> float | None:
        """Share of keys and values in use. None: vLLM's process does not tell."""
        return None

    def sleep(self) -> None:
        self._call(self._engine.sleep(level=1))

    def wake(self) -> None:
        self._call(self._engine.wake_up())

    def close(self) -> None:
        """Closes everything, and then raises the error that stopped vLLM, unless it was raised before."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        wait([self._served], CALL_TIMEOUT_S)
        self._stop_loop()
        # It is ended once more when it is collected, which must not be at the very end of this process: by
        # then nothing is left of the modules that it would call.
        self._engine = None
        gc.collect()
        if self._fault is None:
            self._listen()
            if (error := self._served.exception(0)) is not None:
                raise _as_fault(error)

    # On the engine's thread

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        either: list[Future[Any]] = [future, self._served]
        wait(either, CALL_TIMEOUT_S, FIRST_COMPLETED)
        self._listen()
        try:
            return future.result(0)
        except (EngineDeadError, TimeoutError) as error:
            raise EngineError(f"vLLM does not answer: {error}", hint="look at its log") from error

    def _listen(self) -> None:
        """Takes what has come. Raises EngineError once vLLM has stopped working."""
        for _ in range(self._heard.qsize()):
            self._hear(self._heard.get_nowait())
        if self._fault is not None:
            raise self._fault

    def _hear(self, news: Delta | BaseException) -> None:
        if isinstance(news, Delta):
            self._unheard.append(news)
        elif self._fault is None:
            self._fault = _as_fault(news)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # A call may have arrived with the end of everything: nobody would ever await it.
        if leftover := asyncio.all_tasks(self._loop):
            for task in leftover:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(leftover))
        self._loop.close()

    # On the event loop

    async def _serve(self, settings: DriverSettings, opened: Future[None]) -> None:
        """Owns the engine and everything that runs on this loop."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(settings, runs_on_cpu())
        with deaf_to_the_terminal():
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, enable_log_requests=False))
        try:
            async with self._tasks:
                opened.set_result(None)
                await self._closing.wait()
                await self._abort(list(self._followers))
        finally:
            sockets = self._engine.engine_core.resources.ctx
            self._engine.shutdown(timeout=END_TIMEOUT_S)
            await asyncio.sleep(0)
            # vLLM closes its sockets and leaves their context to the garbage collector, which complains.
            sockets.destroy(linger=0)

    async def _start(self, starts: Sequence[Start]) -> None:
        for start in starts:
            collector = await self._engine.add_request(
                start.key,
                _prompt(start.token_ids, start.salt),
                vllm_sampling(start),
                lora_request=lora_request(start.adapter),
                priority=start.priority,
            )
            follower = self._tasks.create_task(self._follow(start.key, collector))
            follower.add_done_callback(self._report)
            self._followers[start.key] = follower

    async def _follow(self, key: str, collector: Any) -> None:
        """Passes on the tokens of one sequence until it ends. Its failure fails everything here."""
        known_cached = finished = False
        try:
            while not finished:
                output = await collector.get()
                finished = output.finished
                self._heard.put(_delta(key, output, known_cached))
                known_cached = True
        finally:
            collector.close()
            del self._followers[key]

    def _report(self, follower: asyncio.Task[None]) -> None:
        """Reports the reason before the failures that the end of this task causes."""
        if not follower.cancelled() and (error := follower.exception()) is not None:
            self._heard.put(error)

    async def _abort(self, keys: list[str]) -> None:
        following = [self._followers[key] for key in keys if key in self._followers]
        await self._engine.abort(keys)
        await asyncio.gather(*following)

    async def _pause(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)


def _as_fault(error: BaseException) -> EngineError:
    """Returns the error for all later calls to a vLLM that stopped working."""
    if isinstance(error, EngineError):
        return error
    fault = EngineError(f"vLLM stopped working: {error}", hint="look at its log")
    fault.__cause__ = error
    return fault


def _prompt(token_ids: list[int], salt: str) -> Any:
    from vllm import TokensPrompt

    return TokensPrompt(prompt_token_ids=token_ids, cache_salt=salt)


def _delta(key: str, output: Any, known_cached: bool) -> Delta:
    """Returns a `Delta` for vLLM's `RequestOutput`."""
    completion = output.outputs[0]
    return Delta(
        key,
        list(completion.token_ids),
        [] if completion.logprobs is None else list(completion.logprobs.logprobs),
        finish_reason(completion.finish_reason),
        None if known_cached else output.num_cached_tokens,
    )
