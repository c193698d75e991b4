"""A membership that fails or loses track is entered again by its own service, and not without end."""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, cast

import pytest

from swarmnode.errors import NetworkError, PipelineError
from swarmnode.extensions.pipeline.membership.membership import Membership
from swarmnode.extensions.pipeline.runtime.membership_supervisor import MAX_FAILURES, MembershipSupervisor
from tests.unit.extensions.pipeline.runtime.pipeline_home import until


class Pretended:
    """A membership whose own task does what it is told."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._tasks = asyncio.TaskGroup()
        self._running: asyncio.Task[None] | None = None
        self.told: list[int] = []
        self.entered = self.left = False

    async def __aenter__(self) -> "Pretended":
        await self._tasks.__aenter__()
        self._running = self._tasks.create_task(self._work())
        self.entered = True
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._running is not None
        self._running.cancel()
        await self._tasks.__aexit__(exc_type, exc, tb)
        self.left = True

    async def agreed(self, iteration: int) -> int:
        return iteration

    def stepped(self, iteration: int) -> None:
        self.told.append(iteration)


async def holds() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    await asyncio.sleep(0)
    raise NetworkError("the daemon is gone")


class Story:
    """One standing, and the memberships that it came to."""

    def __init__(self, *works: Callable[[], Coroutine[Any, Any, None]], pause_s: float = 0.01) -> None:
        """What the first of them do; the others hold."""
        self._works = [*works]
        self.made: list[Pretended] = []
        self.troubles: list[str] = []
        """Each time that a membership was over."""
        self.supervisor = MembershipSupervisor(
            self._make, steps=lambda: 7, left=self._left, first_pause_s=pause_s
        )

    def _make(self) -> Membership:
        self.made.append(Pretended(self._works.pop(0) if self._works else holds))
        return cast(Membership, self.made[-1])

    def _left(self) -> None:
        self.troubles.append(self.supervisor.trouble)


async def test_who_has_lost_track_leaves_and_comes_back_with_the_steps_that_it_has() -> None:
    story = Story()
    async with story.supervisor as supervisor:
        await supervisor.come_back()
        first, second = story.made
        assert first.left and second.entered and second.told == [7] and story.troubles == [""]
        assert await supervisor.agreed(3) == 3
    assert second.left


async def test_a_membership_that_fails_is_followed_by_another_and_says_so_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = asyncio.Event()

    async def late() -> None:
        await gate.wait()
        await fails()

    story = Story(late)
    async with story.supervisor as supervisor:
        gate.set()
        await until(lambda: len(story.made) == 2)
        await supervisor.agreed(3)
        (told,) = story.troubles
        assert "the daemon is gone" in told and "(1 of" in caplog.text
        assert supervisor.trouble == ""


async def test_failures_without_end_end_the_node_with_the_last_of_them() -> None:
    story = Story(*[fails] * (MAX_FAILURES + 1))
    with pytest.raises(ExceptionGroup) as caught:
        async with story.supervisor:
            await asyncio.Event().wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, PipelineError)
    assert f"failed {MAX_FAILURES} times in a row: the daemon is gone" in error.message
    assert len(story.made) == MAX_FAILURES


async def test_who_cannot_become_a_member_at_all_is_told_why_at_once() -> None:
    supervisor = MembershipSupervisor(
        lambda: cast(Membership, _Refused()), steps=lambda: 0, left=lambda: None
    )
    with pytest.raises(ExceptionGroup) as caught:
        async with supervisor:
            pass
    assert caught.value.subgroup(NetworkError) is not None


class _Refused(Pretended):
    def __init__(self) -> None:
        super().__init__(holds)

    async def __aenter__(self) -> "Pretended":
        raise NetworkError("the host is down")


async def test_a_node_that_ends_does_not_wait_for_the_pause_after_a_failure() -> None:
    story = Story(fails, pause_s=1e6)
    async with story.supervisor as supervisor:
        await until(lambda: supervisor.trouble != "")
