"""A data role ends with its stage, and that is no error."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnode.errors import EngineError
from swarmnode.extensions.pipeline.runtime.data_node import RoleChanged
from swarmnode.extensions.pipeline.runtime.data_roles import RolloutRole
from swarmnode.extensions.pipeline.stages.stage_model import StagePart

FAILED = ExceptionGroup("a round", [EngineError("our own stage was not there within 300 s")])


@pytest.mark.parametrize("part", [None, StagePart(2, 4)])
def test_an_engine_that_fails_without_the_first_stage_changes_the_role(part: StagePart | None) -> None:
    """It may be another one, or its weights are still being fetched from a member that does not hurry."""
    with pytest.raises(RoleChanged):
        role(part)._raise_if_moved(FAILED)


def test_an_engine_that_fails_with_the_first_stage_at_hand_is_an_error() -> None:
    role(StagePart(0, 2, has_ends=True))._raise_if_moved(FAILED)


def role(part: StagePart | None) -> RolloutRole:
    data_node: Any = SimpleNamespace(own_stage=SimpleNamespace(part=part))
    return RolloutRole(data_node, cast(Any, None))
