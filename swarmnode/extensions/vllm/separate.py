"""vLLM in a separate process, which keeps sampling while we do other things: the engine for CUDA.

vllm_engine.py -> vllm_driver.py -> [separate] -> EngineCore of another process -> Delta

Our thread sends requests through vLLM's client, which receives the results of steps on a thread of its own.
Nothing here waits for that process longer than a deadline, or at all once it has died.
"""

import queue
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.pool import ThreadPool
from time import monotonic
from typing import Any

from swarmnode.errors import EngineError
from swarmnode.extensions.vllm.compat import deaf_to_the_terminal, require_vllm, starting_vllm
from swarmnode.extensions.vllm.vllm_driver import (
    Delta,
    Driver,
    DriverSettings,
    core_client,
    delta_of,
    starting_model,
)

CALL_TIMEOUT_S = 600.0
"""Longest call to vLLM in seconds: its start, loading weights of a large model, waking up."""

STEP_TIMEOUT_S = 600.0
"""Longest wait for a token of any sequence, in seconds."""

END_TIMEOUT_S = 4.0
"""Seconds for vLLM's process to end by itself before it is killed: a node has ten seconds to stop."""

LOOK_S = 0.5
"""Seconds between checks of vLLM's process while we wait for it: a killed process reports nothing."""


class SeparateDriver(Driver):
    """A `Driver` for CUDA."""

    def __init__(self, settings: DriverSettings) -> None:
        require_vllm()
        super().__init__()
        self._running: set[str] = set()
        self._fault: EngineError | None = None
        # Calls on a separate thread can be awaited with a deadline, and a start on it leaves Ctrl-C to us.
        self._caller = ThreadPool(1)
        try:
            with starting_vllm(in_process=False, card=settings.card), starting_model(settings.model):
                opened = self._caller.apply_async(_open, (settings,))
                opened.wait(CALL_TIMEOUT_S)
                if not opened.ready():
                    raise TimeoutError(f"it has not started within {CALL_TIMEOUT_S:.0f} s")
                self._client = opened.get()
        except BaseException:
            self._caller.terminate()
            raise

    def start(self, requests: Sequence[Any]) -> None:
        self._running.update(request.request_id for request in requests)
        with self._telling():
            super().start(requests)

    def step(self) -> list[Delta]:
        deadline_s = monotonic() + STEP_TIMEOUT_S
        self._listen()
        while not self._unheard:
            self._fail_after(deadline_s, f"vLLM sampled nothing for {STEP_TIMEOUT_S:.0f} s")
            self._listen(LOOK_S)
        heard, self._unheard = self._unheard, []
        return heard

    def abort(self, keys: Collection[str]) -> list[Delta]:
        with self._telling():
            theirs = super().abort(keys)
        self._running.difference_update(keys)
        return theirs

    def close(self) -> None:
        """Closes everything, then raises the error that stopped vLLM, unless it has been raised before."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._fault is None:
                self._listen()
        finally:
            self._client.shutdown(timeout=END_TIMEOUT_S)
            self._client.output_queue_thread.join(END_TIMEOUT_S)
            # vLLM closes its sockets but leaves their context to the garbage collector, which complains.
            self._client.ctx.destroy(linger=0)
            self._caller.terminate()

    def _call(self, method: str, *arguments: object) -> object:
        deadline_s = monotonic() + CALL_TIMEOUT_S
        self._listen()
        # vLLM's errors have no narrower type than Exception, for example if an adapter cannot be loaded.
        refused: list[BaseException] = []
        call = self._client.call_utility
        asked = self._caller.apply_async(call, (method, *arguments), error_callback=refused.append)
        while not asked.ready():
            self._fail_after(deadline_s, f"vLLM did not answer within {CALL_TIMEOUT_S:.0f} s")
            asked.wait(LOOK_S)
            self._listen()
        self._listen()
        if refused:
            raise EngineError(f"vLLM cannot do that: {refused[0]}", hint="see its log") from refused[0]
        return asked.get()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Context in which vLLM's client sends something."""
        from vllm.v1.engine.exceptions import EngineDeadError
        from zmq import ZMQError

        self._listen()
        try:
            yield
        except (EngineDeadError, ZMQError):
            self._listen()
            raise

    def _listen(self, wait_s: float = 0.0) -> None:
        """Takes the outputs that have arrived, waiting at most this long for the first. Raises EngineError
        once vLLM has stopped working."""
        with suppress(queue.Empty):
            self._hear(self._client.outputs_queue.get(timeout=wait_s))
            while True:
                self._hear(self._client.outputs_queue.get_nowait())
        if self._fault is None and self._client.resources.engine_dead:
            self._fault = _fault("vLLM stopped working: its process has ended")
        if self._fault is not None:
            raise self._fault

    def _hear(self, news: Any) -> None:
        if isinstance(news, Exception):
            self._fault = self._fault or _fault(f"vLLM stopped working: {news}", news)
            return
        for output in news.outputs:
            if output.request_id in self._running:  # Otherwise vLLM sampled it before it got the abort.
                self._take(output)

    def _take(self, output: Any) -> None:
        try:
            delta = delta_of(output)
        except EngineError as error:
            self._fault = self._fault or error
            return
        if delta.finish is not None:
            self._running.discard(delta.key)
        self._unheard.append(delta)

    def _fail_after(self, deadline_s: float, what: str) -> None:
        if monotonic() > deadline_s:
            self._fault = _fault(what)
            raise self._fault


def _open(settings: DriverSettings) -> Any:
    with deaf_to_the_terminal():
        return core_client(settings, multiprocess=True)


def _fault(what: str, cause: Exception | None = None) -> EngineError:
    """Returns the error for all later calls to a vLLM that has stopped working."""
    fault = EngineError(what, hint="see its log")
    fault.__cause__ = cause
    return fault
