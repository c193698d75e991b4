"""The path that a group was sampled on stays with it: across checkpoints, and not beyond this node."""

import msgspec
import pytest

from swarmnode.errors import CheckpointError
from swarmnode.exchange.messages import Answer, Body
from swarmnode.rollout.engine import Output, Sampled, SamplingParams
from swarmnode.rollout.schedule.length_estimates import LengthEstimates
from swarmnode.rollout.schedule.open_group import OpenCompletion, OpenGroup, as_open_group
from swarmnode.rollout.schedule.scheduler_state import decode, encode
from swarmnode.types import Example, ExampleKey, one_span

PATH = (0, 2, 1)
KEY = ExampleKey("task", "1", 0, 3)
SAMPLING = SamplingParams(8)


class Letters:
    """A renderer that needs no tokenizer."""

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        return tuple(map(ord, prompt))

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return "".join(map(chr, token_ids))


def sampled(path: tuple[int, ...] = PATH, tokens: int = 2) -> Sampled:
    return Sampled((65,) * tokens, (-0.5,) * tokens, one_span(0, tokens), path)


def group(*members: OpenCompletion) -> OpenGroup:
    return OpenGroup(0, Example(KEY, "q"), (1, 2), list(members))


def test_more_tokens_stay_on_the_path() -> None:
    longer = Sampled(path=PATH).extended((66,), (-0.1,), one_span(0, 1))
    assert (longer.path, longer.token_ids) == (PATH, (66,))


def test_the_members_of_a_group_that_have_no_token_are_asked_along_the_path_of_the_others() -> None:
    begun = group(OpenCompletion(), OpenCompletion(sampled()), OpenCompletion())
    asked = [begun.request(place, SAMPLING) for place in range(3)]
    assert [request.sampled.path for request in asked] == [PATH] * 3
    assert [len(request.sampled) for request in asked] == [0, 2, 0]
    assert asked[1].priority < asked[0].priority == asked[2].priority


def test_without_a_pipeline_there_is_no_path() -> None:
    assert group(OpenCompletion(), OpenCompletion(sampled(path=()))).request(0, SAMPLING).sampled.path == ()


def test_a_completion_knows_its_path_and_keeps_it_when_it_is_written_down_again() -> None:
    begun = group(OpenCompletion())
    begun.record(0, Output("0/0", sampled(), "stop"))
    answered = begun.answered(Letters())  # type: ignore[arg-type]
    assert answered.completions[0].path == PATH
    assert as_open_group(answered).members[0].sampled.path == PATH


def test_the_path_does_not_travel_to_other_nodes() -> None:
    assert "path" not in (*Answer.__struct_fields__, *Body.__struct_fields__)


def test_the_path_is_kept_across_a_checkpoint() -> None:
    begun = group(OpenCompletion(sampled(), "stop"), OpenCompletion())
    in_engine = {"0/1": sampled((0, 1))}
    kept = decode(encode([begun], in_engine, LengthEstimates(), may_stay_behind=0.0))
    assert [member.sampled.path for member in kept.groups[0][1]] == [PATH, (0, 1)]


def without_paths(state: bytes) -> bytes:
    """As it was written before there were any."""
    found = msgspec.msgpack.decode(state)
    for one in found["groups"]:
        one[4] = [member[:4] for member in one[4]]
    return msgspec.msgpack.encode(found)


def test_states_of_before_paths_were_recorded_are_read() -> None:
    state = encode(
        [group(OpenCompletion(sampled(path=()), "stop"), OpenCompletion())],
        {},
        LengthEstimates(),
        may_stay_behind=0.0,
    )
    kept = decode(without_paths(state))
    assert kept.groups == decode(state).groups
    assert [member.sampled.path for member in kept.groups[0][1]] == [(), ()]


@pytest.mark.parametrize("path", [(-1,), (64,), (0,) * 65, ("x",)])
def test_a_damaged_path_is_refused(path: tuple[int, ...]) -> None:
    found = msgspec.msgpack.decode(
        encode([group(OpenCompletion(sampled()))], {}, LengthEstimates(), may_stay_behind=0.0)
    )
    found["groups"][0][4][0][4] = path
    with pytest.raises(CheckpointError):
        decode(msgspec.msgpack.encode(found))
