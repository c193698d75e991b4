"""Turns running out of memory at a stage into the refusal of one micro-batch.

stage.py (a pass) -> [within_memory] -> Rejected -> relay.py, driver.py: the data node goes another way
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.model.budget import is_out_of_memory


@contextmanager
def within_memory(refused: Counter[Refusal]) -> Generator[None]:
    """Raises Rejected: no_memory, in place of torch's out-of-memory errors, and counts it in `refused`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
    else:
        return
    # Outside of the handler: what the pass has left on the stack need not wait for this one to be read.
    refused[Refusal.NO_MEMORY] += 1
    raise Rejected(Refusal.NO_MEMORY, said)
