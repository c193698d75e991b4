"""One synchronous round: examples in, all their groups out, each as soon as it is complete.

evaluation.py -> examples -> [collect] -> partial.py -> engine

Where nothing may stay under way: evaluations, and anything that is asked once.
"""

from collections.abc import Callable, Generator, Sequence

from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.group import Answered
from swarmnode.rollout.schedule.partial import PartialRollouts
from swarmnode.rollout.schedule.records import PartialSettings
from swarmnode.types import Example


def collect(
    engine: Engine,
    renderer: Renderer,
    examples: Sequence[Example],
    group_size: int,
    sampling: SamplingParams,
    *,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[Answered, None, None]:
    """Sample `group_size` completions of each example; yield each group when its last one has finished.

    When `should_stop` says so, or the caller closes the iterator, the unfinished is aborted and not yielded.
    An example that the engine refuses (too long a prompt) is logged and left out. `sampling.seed` is replaced
    by one per completion, made from `seed`: the same seed asks for the same samples.
    """
    if not examples:
        return
    settings = PartialSettings("sync", groups=len(examples), group_size=group_size, max_lag=0)
    rollouts = PartialRollouts(engine, renderer, settings, sampling, seed=seed)
    yield from rollouts.round(iter(examples), should_stop=should_stop)
