"""The training messages between members, one record each, with bounds checked before anything is allocated.

message_sender.py -> [hop_messages] -> tensor_transport.py -> wire -> [hop_messages] -> pipeline_member.py

A message names its plan, its work and the `attempt`. The same work sent another way has a higher attempt, and
a message sent again is equal to the first, so the receiver can count it exactly once whatever happens.
Activations and gradients follow their message as raw bytes, described by its `TensorHeader` (codec.py).
"""

import math
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from swarmnode.extensions.pipeline.wire.services import MAX_TENSOR_BYTES, MemberMessage

MAX_DIM = 1 << 22
MAX_NODES = 1024
MAX_PATH = 64
"""Most stages that one micro-batch can visit; no model that we train has more layers."""

MAX_SEQUENCES = 2048
"""Most packed sequences in one micro-batch."""

MAX_PROMPT_TOKENS = 1 << 20
"""Most tokens of shared prompts in one micro-batch, each counted once for every run that continues it. The
receiver lays all of them out one after the other (model/layout.py), so a message of a few bytes must not be
able to make this large."""

MAX_BACK = 4096
"""Most micro-batches of one data node that can pass one member in one iteration."""

MAX_ATTEMPTS = 64
"""Most attempts at one message. After that many failures, another attempt will not succeed."""

SIGNATURE_BYTES = 64

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Index = Annotated[int, Meta(ge=0, lt=MAX_NODES)]
Dim = Annotated[int, Meta(ge=1, le=MAX_DIM)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Attempt = Annotated[int, Meta(ge=0, lt=MAX_ATTEMPTS)]
Run = Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Dtype = Literal["float32", "bfloat16", "float16"]
CodecName = Literal["none", "fp16"]
Trouble = Literal["silent", "full", "refused"]
"""Reason why a micro-batch cannot get past a node. silent: no answer within the deadline. full: the node has
no slot. refused: the node does not accept it, or cannot compute it."""


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Describes how to read the bytes after a message as a tensor. Every instance is consistent and within
    bounds."""

    dtype: Dtype
    """Type of the numbers that follow."""
    shape: Annotated[tuple[Dim, ...], Meta(min_length=1, max_length=3)]

    def __post_init__(self) -> None:
        if self.payload_bytes > MAX_TENSOR_BYTES:
            raise ValueError(f"a tensor {self.shape} of {self.dtype} exceeds {MAX_TENSOR_BYTES} bytes")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def payload_bytes(self) -> int:
        """Number of bytes after the message. Computed from the header, so that no sender has to state it."""
        return self.size * _ITEM_BYTES[self.dtype]


class _Message(MemberMessage, frozen=True, kw_only=True):
    plan: Digest
    iteration: Count
    attempt: Attempt = 0


class Hop(_Message, frozen=True, kw_only=True):
    """A message followed by a tensor, from one node of a path to its neighbour on the path."""

    micro_batch: Count
    """Number given by the data node, unique within the plan and iteration, and the same on the whole
    path."""
    agent: Count
    """The slot of the data node in which the micro-batch started."""
    wave: Count
    path: Annotated[tuple[Index, ...], Meta(min_length=2, max_length=MAX_PATH)]
    """Nodes in order of visit, starting with the data node. The path may differ from the plan's if a member
    was replaced or left out."""
    position: Annotated[int, Meta(ge=0, le=MAX_PATH)]
    tensor: TensorHeader
    first_position: ClassVar[int] = 0
    """Smallest position that such a message can have; there are as many as nodes."""

    def __post_init__(self) -> None:
        if not 0 <= self.position - self.first_position < len(self.path):
            raise ValueError(f"position {self.position} is not on a path of {len(self.path)} nodes")
        if len(set(self.path)) < len(self.path):
            raise ValueError("a path visits a node twice")

    @property
    def payload_bytes(self) -> int:
        return self.tensor.payload_bytes


class ForwardHop(Hop, frozen=True, kw_only=True, tag="forward"):
    """Hidden states of a micro-batch, for the node at `position` of its path. The position after the end of
    the path is the data node, which needs them for the loss."""

    first_position: ClassVar[int] = 1
    tokens: Annotated[int, Meta(ge=1, le=2**40)]
    """Tokens, or answers, that are learned from: the weight of this micro-batch relative to others."""
    lengths: Annotated[tuple[Dim, ...], Meta(max_length=MAX_SEQUENCES)] = ()
    """Tokens of each packed run, in order. Empty if each row is one sequence."""
    prompts: Annotated[tuple[Run | None, ...], Meta(max_length=MAX_SEQUENCES)] = ()
    """By run, the run that it continues, as in model/layout.py. Empty if every run is a whole sequence."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    """Signature of the data node (signing.py). Not needed by the node that receives this directly from the
    data node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts:
            return
        if len(self.prompts) != len(self.lengths):
            raise ValueError(f"{len(self.prompts)} prompts for {len(self.lengths)} runs")
        repeated = 0
        for run, prompt in enumerate(self.prompts):
            if prompt is None:
                continue
            if prompt >= run or self.prompts[prompt] is not None:
                raise ValueError(f"run {run} cannot continue run {prompt}")
            repeated += self.lengths[prompt]
        if repeated > MAX_PROMPT_TOKENS:
            raise ValueError(f"shared prompts of {repeated} tokens, at most {MAX_PROMPT_TOKENS}")

    def backward(self, position: int) -> "BackwardHop":
        """Return the message that carries the gradient of this micro-batch to the node at `position`."""
        return BackwardHop(
            plan=self.plan,
            iteration=self.iteration,
            attempt=self.attempt,
            micro_batch=self.micro_batch,
            agent=self.agent,
            wave=self.wave,
            path=self.path,
            position=position,
            tensor=self.tensor,
        )

    @property
    def source(self) -> int:
        """The node that must be the sender of this message."""
        return self.path[self.position - 1]

    @property
    def target(self) -> int:
        return self.path[self.position % len(self.path)]


class BackwardHop(Hop, frozen=True, kw_only=True, tag="backward"):
    """Gradient of the loss with respect to the hidden states that the node at `position` passed on."""

    @property
    def source(self) -> int:
        """The node that must be the sender of this message: the next one on the path, or the data node if
        this is for the last node."""
        return self.path[(self.position + 1) % len(self.path)]

    @property
    def target(self) -> int:
        return self.path[self.position]


class _OfMicroBatch(_Message, frozen=True, kw_only=True):
    micro_batch: Count
    position: Annotated[int, Meta(ge=0, le=MAX_PATH)] = 0
    """Position on the path of the node that this message is about, or that it asks."""


class Lost(_OfMicroBatch, frozen=True, kw_only=True, tag="lost"):
    """Tells a data node that its micro-batch cannot get past the node at `position`. Sent by that node or by
    its neighbour on the path."""

    fault: Trouble


class Passed(_OfMicroBatch, frozen=True, kw_only=True, tag="passed"):
    """A data node asks the node at `position` if it has passed on this micro-batch.

    The answer is Done if it has, too_slow if the micro-batch is still there, unknown_work if it is not. This
    exposes members that accept everything and do nothing. With position 0, any member asks a data node if its
    part of this iteration is still to come or under way; Done means yes.
    """

    homeward: bool
    """True if the question is about the micro-batch's gradient."""


class Finished(_Message, frozen=True, kw_only=True, tag="finished"):
    """A data node tells one member that it has finished its part of an iteration."""

    node: Index
    """The data node that has finished."""
    back: Annotated[tuple[tuple[Count, Attempt], ...], Meta(max_length=MAX_BACK)]
    """(micro-batch, attempt) of those that came back along a path that includes the member. All others that
    the member has were counted by replicas, or do not count at all."""


Message = ForwardHop | BackwardHop | Lost | Passed | Finished
