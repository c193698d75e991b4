"""Writes checkpoints beside the training, on one thread, in order.

learner.save -> snapshot -> [CheckpointWriter] -> CheckpointStore.write

Memory is bounded: besides the snapshot that is being written at most one waits. A newer one takes its place,
since it holds everything that the older one does; the newest is never given up. That happens only on a disk
that takes longer for a checkpoint than training takes for the rounds between two.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Generic, TypeVar

Content = TypeVar("Content")


class CheckpointWriter(Generic[Content]):
    """Hands snapshots to `write`, which blocks and returns the checkpoint's name.

    >>> writer = CheckpointWriter[str](lambda snapshot: f"round-{snapshot}")
    >>> writer.submit("7").result()
    'round-7'
    >>> writer.close()
    """

    def __init__(self, write: Callable[[Content], str]) -> None:
        self._write = write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._newest: tuple[Future[str], list[Content]] | None = None

    def submit(self, snapshot: Content) -> Future[str]:
        """Write this one when the one before is done. To be called by one thread at a time.

        The result is the name of the checkpoint once it is on disk, or the error of `write`; cancelled means
        that a newer snapshot was there before this one's turn came.
        """
        if self._newest is not None:
            future, held = self._newest
            if future.cancel():
                # The executor keeps what it was given until it comes to it: let go of the tensors now.
                held.clear()
        held = [snapshot]
        # With the context of the caller: log lines say which policy they are about.
        future = self._thread.submit(copy_context().run, self._write_held, held)
        self._newest = future, held
        return future

    def close(self) -> None:
        """Wait until everything is written. Nothing is submitted after it."""
        self._thread.shutdown()

    def _write_held(self, held: list[Content]) -> str:
        return self._write(held.pop())
