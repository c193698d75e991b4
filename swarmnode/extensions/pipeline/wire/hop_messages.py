"""The messages of training between members, one record each, bounded before anything is allocated.

message_sender.py -> [hop_messages] -> tensor_transport.py -> wire -> [hop_messages] -> pipeline_member.py

A message names the plan it belongs to, its work and the `attempt`. The same work brought another way has a
higher attempt, and the same message sent again is equal to the first, so that a receiver can count it once
whatever happens. Activations and gradients follow their message as raw bytes, described by its
`TensorHeader` (codec.py).
"""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarmnode.extensions.pipeline.wire.services import MAX_TENSOR_BYTES, MemberMessage

MAX_DIM = 1 << 22
MAX_NODES = 1024
MAX_PATH = 64
"""Stages that one micro-batch visits; no model we train has more layers than this."""

MAX_SEQUENCES = 2048
"""Packed sequences in one micro-batch."""

MAX_PROMPT_TOKENS = 1 << 20
"""Tokens of shared prompts of one micro-batch, each counted as often as it is continued: the receiver lays
them out one after the other (model/layout.py), which a few bytes must not be able to make large."""

MAX_BACK = 4096
"""Micro-batches of one data node that pass one member in one iteration."""

MAX_ATTEMPTS = 64
"""Attempts at one message. After that many failures another one is not going to succeed."""

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
"""Reason why a micro-batch does not get past a node. silent: no answer within the deadline. full: it has no
slot. refused: it does not take it, or cannot compute it."""


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The description by which the bytes behind a message become a tensor. An instance is consistent and
    within bounds."""

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
        """Bytes behind the message. Computed from the header, so that no sender has to claim it."""
        return self.size * _ITEM_BYTES[self.dtype]


class _Message(MemberMessage, frozen=True, kw_only=True):
    plan: Digest
    iteration: Count
    attempt: Attempt = 0


class Hop(_Message, frozen=True, kw_only=True):
    """A message with a tensor behind it, from one node of a path to its neighbour there."""

    micro_batch: Count
    """Number given by the data node, unique within its plan and iteration, and unchanged on the whole
    path."""
    agent: Count
    """The slot of the data node that started it."""
    wave: Count
    path: Annotated[tuple[Index, ...], Meta(min_length=2, max_length=MAX_PATH)]
    """Nodes in order of visit, the data node first. The route that is really taken may differ from the plan's
    when a member was replaced or left out."""
    position: Annotated[int, Meta(ge=0, le=MAX_PATH)]
    tensor: TensorHeader

    def __post_init__(self) -> None:
        if not self._first_position() <= self.position <= self._last_position():
            raise ValueError(f"position {self.position} is not on a path of {len(self.path)} nodes")
        if len(set(self.path)) < len(self.path):
            raise ValueError("a path visits a node twice")

    def _first_position(self) -> int:
        return 0

    def _last_position(self) -> int:
        return len(self.path) - 1

    @property
    def payload_bytes(self) -> int:
        return self.tensor.payload_bytes


class ForwardHop(Hop, frozen=True, kw_only=True, tag="forward"):
    """Hidden states of a micro-batch, for the node at `position` of its path. Behind the end of the path the
    data node receives them for the loss."""

    tokens: Annotated[int, Meta(ge=1, le=2**40)]
    """Tokens, or answers, that are learned from: the weight of the micro-batch against others."""
    lengths: Annotated[tuple[Dim, ...], Meta(max_length=MAX_SEQUENCES)] = ()
    """Tokens of each packed run, in order. Empty if each row is one sequence."""
    prompts: Annotated[tuple[Run | None, ...], Meta(max_length=MAX_SEQUENCES)] = ()
    """By run, the run that it continues, as in model/layout.py. Empty if every run is a whole sequence."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    """Signature of the data node (signing.py). The node that receives this from the data node itself does not
    need it."""

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
        """Return the message that takes the gradient of this micro-batch to the node at `position`."""
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

    def _first_position(self) -> int:
        return 1

    def _last_position(self) -> int:
        return len(self.path)

    @property
    def source(self) -> int:
        """The node that must have sent this message."""
        return self.path[self.position - 1]

    @property
    def target(self) -> int:
        return self.path[self.position % len(self.path)]


class BackwardHop(Hop, frozen=True, kw_only=True, tag="backward"):
    """Gradient of the loss with respect to the hidden states that the node at `position` handed on."""

    @property
    def source(self) -> int:
        """The node that must have sent this message: the next one on the path, or the data node for the
        last."""
        return self.path[(self.position + 1) % len(self.path)]

    @property
    def target(self) -> int:
        return self.path[self.position]


class _OfMicroBatch(_Message, frozen=True, kw_only=True):
    micro_batch: Count
    position: Annotated[int, Meta(ge=0, le=MAX_PATH)] = 0
    """Position on the path of the node that this message is about, or of the node that is asked."""


class Lost(_OfMicroBatch, frozen=True, kw_only=True, tag="lost"):
    """A report to a data node that its micro-batch does not get past the node at `position`, sent by that
    node or by its neighbour on the path."""

    fault: Trouble


class Passed(_OfMicroBatch, frozen=True, kw_only=True, tag="passed"):
    """A data node's question to the node at `position`: have you handed on this micro-batch?

    The answer is Done if it has, too_slow if the micro-batch is still there, unknown_work if it is not. So a
    member is found that accepts everything and does nothing. At position 0 any member asks a data node if its
    part of this iteration is still to come or under way; Done means yes.
    """

    homeward: bool
    """True if the question is about the gradient of the micro-batch."""


class Finished(_Message, frozen=True, kw_only=True, tag="finished"):
    """A data node's report to one member that it has done its part of an iteration."""

    node: Index
    """The data node that has finished."""
    back: Annotated[tuple[tuple[Count, Attempt], ...], Meta(max_length=MAX_BACK)]
    """(micro-batch, attempt) of those that came back along a path on which the member is. Others that it has
    were counted by replicas, or do not count at all."""


Message = ForwardHop | BackwardHop | Lost | Passed | Finished
