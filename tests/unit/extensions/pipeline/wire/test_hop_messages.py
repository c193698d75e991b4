"""Messages: what is said is read back, and what is out of bounds is never read at all."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.frames import decode, encode
from swarmnode.extensions.pipeline.wire.hop_messages import (
    MAX_ATTEMPTS,
    MAX_BACK,
    MAX_NODES,
    MAX_PATH,
    MAX_PROMPT_TOKENS,
    MAX_SEQUENCES,
    BackwardHop,
    Finished,
    ForwardHop,
    Lost,
    Message,
    Passed,
    TensorHeader,
)
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers, check_sender
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import LIMITS, MemberService

PLAN = "ab" * 32
OTHER = "cd" * 32
HEADER = TensorHeader(dtype="float32", shape=(2, 3, 64))
FORWARD = ForwardHop(
    plan=PLAN, iteration=3, attempt=1, micro_batch=9, agent=4, wave=1,
    path=(0, 5, 2), position=1, tensor=HEADER, tokens=4, lengths=(3, 3), prompts=(None, 0),
)  # fmt: skip
BACKWARD = BackwardHop(
    plan=PLAN, iteration=3, micro_batch=9, agent=4, wave=1, path=(0, 5, 2), position=1,
    tensor=HEADER,
)  # fmt: skip
LOST = Lost(plan=PLAN, iteration=3, attempt=2, micro_batch=9, position=1, fault="silent")
PASSED = Passed(plan=PLAN, iteration=3, attempt=2, micro_batch=9, position=1, homeward=False)
FINISHED = Finished(plan=PLAN, iteration=3, node=0, back=((9, 2), (11, 0)))
MEMBERS = PlanMembers(PLAN, ("peer 0", "peer 1", "peer 2", "peer 3", "peer 4", "peer 5"), own=5)


def with_fields(message: Message, **fields: object) -> bytes:
    """The message as a sender without our checks would write it."""
    names = [field.name for field in msgspec.structs.fields(type(message))]
    said = msgspec.structs.asdict(message).items()
    values = {name: msgspec.to_builtins(value, builtin_types=(bytes,)) for name, value in said}
    values |= fields
    tag = type(message).__struct_config__.tag
    return msgspec.msgpack.encode([tag, *(values[name] for name in names)])


def refusal(data: bytes) -> str:
    with pytest.raises(Rejected) as caught:
        decode(Message, data)
    return caught.value.reason


@pytest.mark.parametrize("message", [FORWARD, BACKWARD, LOST, PASSED, FINISHED])
def test_a_message_is_read_as_it_was_said(message: Message):
    assert decode(Message, encode(message)) == message
    assert decode(Message, with_fields(message)) == message


def test_the_longest_honest_message_is_within_the_bound():
    message = msgspec.structs.replace(
        FORWARD,
        path=tuple(range(MAX_NODES - MAX_PATH, MAX_NODES)),
        tokens=2**40,
        lengths=(1000,) * (MAX_SEQUENCES // 2) + (70_000,) * (MAX_SEQUENCES // 2),
        prompts=(None,) * (MAX_SEQUENCES // 2) + tuple(range(MAX_SEQUENCES // 2)),
    )
    most = LIMITS[MemberService.HOPS].max_message_bytes
    assert decode(Message, encode(message)) == message
    assert len(encode(message)) <= most
    end = msgspec.structs.replace(FINISHED, back=((2**20, 63),) * MAX_BACK)
    assert decode(Message, encode(end)) == end
    assert len(encode(end)) <= most


@pytest.mark.parametrize(
    "fields",
    [
        {"plan": "AB" * 32},
        {"plan": "ab" * 31},
        {"plan": PLAN + "\n"},
        {"iteration": -1},
        {"attempt": MAX_ATTEMPTS},
        {"micro_batch": "9"},
        {"path": [0]},
        {"path": [0, 5, 5]},
        {"path": [0, 5, 0]},
        {"path": [0, MAX_NODES]},
        {"path": list(range(MAX_PATH + 1))},
        {"position": 0},
        {"position": 4},
        {"lengths": [0]},
        {"lengths": [1] * (MAX_SEQUENCES + 1)},
        {"prompts": [None]},
        {"prompts": [None, 1]},
        {"prompts": [0, None]},
        {"lengths": [3, 3, 3], "prompts": [None, 0, 1]},
        {"lengths": [MAX_PROMPT_TOKENS // 2, 1, 1, 1], "prompts": [None, 0, 0, 0]},
        {"tokens": 0},
        {"tokens": 2**41},
        {"tensor": ["fp16", "float32", [2, 0]]},
        {"tensor": ["fp16", "float32", [2, 2, 2, 2]]},
        {"tensor": ["fp16", "float32", []]},
        {"tensor": ["fp16", "float32", [4096, 4097]]},
        {"tensor": ["fp16", "float32", [2**22, 2**22, 2**22]]},
        {"tensor": ["fp16", "float64", [2, 2]]},
        {"tensor": ["gzip", "float32", [2, 2]]},
        {"tensor": ["none", "float32", [2, 2], "more"]},
    ],
)
def test_a_field_out_of_bounds_makes_a_message_malformed(fields: dict[str, object]):
    assert refusal(with_fields(FORWARD, **fields)) == Refusal.MALFORMED


def test_a_gradient_goes_to_a_node_of_the_path():
    assert decode(Message, with_fields(BACKWARD, position=0)) == msgspec.structs.replace(BACKWARD, position=0)
    assert refusal(with_fields(BACKWARD, position=3)) == Refusal.MALFORMED


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_and_nothing_else(data: bytes):
    assert refusal(data) == Refusal.MALFORMED


def test_the_bytes_that_follow_are_counted_from_the_header_alone():
    assert FORWARD.payload_bytes == 4 * 2 * 3 * 64
    assert PASSED.payload_bytes == 0


def test_a_hop_comes_from_the_node_before_us_on_its_path():
    plans = {PLAN: MEMBERS}
    check_sender(FORWARD, "peer 0", plans)
    check_sender(BACKWARD, "peer 2", plans)
    for message, liar in ((FORWARD, "peer 2"), (BACKWARD, "peer 0"), (FORWARD, "peer 5")):
        with pytest.raises(Rejected, match=Refusal.WRONG_ROUTE):
            check_sender(message, liar, plans)


def test_the_data_node_gets_the_end_of_the_path_and_starts_the_way_back():
    at_home = {PLAN: PlanMembers(PLAN, MEMBERS.peers, own=0)}
    check_sender(msgspec.structs.replace(FORWARD, position=3), "peer 2", at_home)
    check_sender(msgspec.structs.replace(BACKWARD, position=0), "peer 5", at_home)
    at_the_end = {PLAN: PlanMembers(PLAN, MEMBERS.peers, own=2)}
    check_sender(msgspec.structs.replace(BACKWARD, position=2), "peer 0", at_the_end)


def test_a_hop_for_another_node_is_not_ours():
    with pytest.raises(Rejected, match=Refusal.WRONG_ROUTE):
        check_sender(FORWARD, "peer 0", {PLAN: PlanMembers(PLAN, MEMBERS.peers, own=2)})


def test_nobody_ends_an_iteration_in_the_name_of_another():
    check_sender(FINISHED, "peer 0", {PLAN: MEMBERS})
    with pytest.raises(Rejected, match=Refusal.WRONG_ROUTE):
        check_sender(FINISHED, "peer 1", {PLAN: MEMBERS})


def test_a_path_through_nodes_that_the_plan_lacks_is_refused():
    message = msgspec.structs.replace(FORWARD, path=(0, 5, 6))
    with pytest.raises(Rejected, match=Refusal.WRONG_ROUTE):
        check_sender(message, "peer 0", {PLAN: MEMBERS})


@pytest.mark.parametrize("message", [FORWARD, PASSED])
def test_strangers_and_unknown_plans_are_refused(message: Message):
    with pytest.raises(Rejected, match=Refusal.NOT_A_MEMBER):
        check_sender(message, "peer 6", {PLAN: MEMBERS})
    with pytest.raises(Rejected, match=Refusal.UNKNOWN_PLAN):
        check_sender(message, "peer 0", {OTHER: MEMBERS})
