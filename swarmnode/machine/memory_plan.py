"""The memory that a model takes: sums that a person can check, computed before anything is loaded."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarmnode.machine.hardware import GIB

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a number in NF4: four bits, one byte of scale per 64 numbers, and four bytes per 256 scales
(QLoRA, section 3)."""
ADAPTER_BYTES = 4
"""Bytes of an adapter's parameter. PEFT keeps LoRA in float32, also over a 16-bit base: it is its own master
copy."""
MOMENT_BYTES = 8
"""Bytes of Adam's two moments in float32."""
MEASURED_GRADIENTS = 3
"""Gradients held at once while authors of one task are measured: an author's, that of our finds, and the mean
of all tasks (training/rules/gradients.py). Each further task with finds of ours adds one."""
CHUNK_BYTES = 256 * 2**20
"""Size of one float32 tensor [tokens, vocabulary]: log-probabilities are computed for that many tokens at
once."""
LEAST_CHUNK_TOKENS = 256
CUDA_RESERVE_BYTES = GIB
"""Bytes of the driver's context, of cuBLAS workspaces, and of memory that torch's allocator holds but cannot
use."""
CPU_RESERVE_BYTES = GIB // 2
"""Bytes of the code of torch and transformers, resident before any weight is loaded."""
SAME_SIZE = 0.05
"""Share by which a model's parameters may differ from those of its matrices: norms, biases, padding."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Shapes of a dense decoder: attention with grouped keys, and an MLP with a gate."""

    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    """True if one matrix is both the embedding and the head."""
    qk_norm: bool = False
    """True if queries and keys are normalised, as in Qwen3; the backward pass then keeps them in
    float32."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linear_parameters(self) -> int:
        """Number of parameters in the linear layers with LoRA (all but the head)."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def linear_widths(self) -> int:
        """Sum of inputs and outputs of the linear layers with LoRA: an adapter has rank times as many
        numbers."""
        attention = 4 * self.hidden + 2 * self.query_width + 2 * self.kv_width
        return self.layers * (attention + 3 * (self.hidden + self.intermediate))

    @property
    def is_consistent(self) -> bool:
        """True if the number of parameters matches such a decoder; for a mixture of experts or a plain MLP it
        differs."""
        expected = self.linear_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2)
        return abs(self.parameters - expected) <= SAME_SIZE * expected


@dataclass(frozen=True, slots=True)
class Workload:
    """The work on a model, as far as it determines memory."""

    rank: int
    """LoRA rank."""
    slots: int
    """Most sequences generated at the same time."""
    sequence_tokens: int
    """Tokens of the longest prompt and completion."""
    micro_batch_tokens: int
    """Tokens in one forward pass of training."""
    number_bytes: int = 2
    """Bytes of one weight or activation: 2 for bfloat16, 4 for float32."""
    nf4: bool = False
    """True if the trainer's linear layers are in 4 bits; products have `number_bytes`."""
    policies: int = 1
    """Number of adapters over the one base model."""
    guest_copies: int = 0
    """Versions that the engine holds for guests beside the newest ones, including the base."""
    engine: "EngineMemory" = field(default_factory=lambda: EMBEDDED_MEMORY)
    engine_bytes: float | None = None
    """Fixed bytes of the engine (its share of a card). None: as many as it needs."""
    gpu: bool = True
    checkpointing: bool = False
    """True if the backward pass computes activations again, layer by layer."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose for generating with and training one model."""

    weights: float
    """The frozen base, as the trainer holds it."""
    engine_weights: float
    """The engine's own copy."""
    adapters: float
    """LoRA parameters of all policies, and the copy that is handed to the engine."""
    gradients: float
    """Gradients of the adapters, and the copy in the type of the base that layers keep for them."""
    optimizer: float
    activations: float
    """Activations kept for the backward pass of one micro-batch."""
    logprobs: float
    """One chunk of logits and its gradient."""
    kv_cache: float
    """Keys and values with a sequence of full length in every slot: the maximum, not the usual amount."""
    reserve: float
    engine: str
    micro_batch_tokens: int
    checkpointing: bool

    @property
    def total(self) -> float:
        return self.loaded + self.gradients + self.optimizer + self.step + self.kv_cache

    @property
    def loaded(self) -> float:
        """Bytes in use as soon as everything is loaded."""
        return self.weights + self.engine_weights + self.adapters + self.reserve

    @property
    def step(self) -> float:
        """Bytes allocated and freed with every micro-batch."""
        return self.activations + self.logprobs

    def describe(self) -> str:
        """Returns the sum in one line."""
        again = ", recomputed" if self.checkpointing else ""
        parts = (
            ("weights", self.weights),
            (f"{self.engine} engine's weights", self.engine_weights),
            ("adapters, gradients and Adam", self.adapters + self.gradients + self.optimizer),
            (f"activations of {self.micro_batch_tokens} tokens{again}", self.activations),
            ("log-probabilities", self.logprobs),
            ("KV cache", self.kv_cache),
            ("reserve", self.reserve),
        )
        return f"{size_text(self.total)} = " + " + ".join(f"{name} {size_text(size)}" for name, size in parts)


def size_text(size: float) -> str:
    """Returns bytes in a readable unit.

    >>> size_text(24 * 2**30), size_text(300 * 2**20), size_text(2**19)
    ('24.0 GiB', '300 MiB', '0.5 MiB')
    """
    mebibytes = max(0.0, size) / 2**20
    if mebibytes >= 1024:
        return f"{mebibytes / 1024:.1f} GiB"
    return f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.1f} MiB"


def plan_memory(card: ModelCard, work: Workload) -> MemoryPlan:
    """Returns the bytes for generating with and training `card`.

    >>> card = ModelCard("m", 2e9, layers=10, hidden=1000, intermediate=4000, heads=10, kv_heads=2,
    ...     head_dim=100, vocabulary=50_000)
    >>> plan = plan_memory(card, Workload(rank=10, slots=10, sequence_tokens=1000, micro_batch_tokens=1000))
    >>> plan.weights, plan.optimizer, plan.kv_cache
    (4000000000.0, 17120000, 80000000)
    """
    adapter = adapter_parameters(card, work.rank) * work.policies
    # A sequence longer than a micro-batch is processed alone.
    tokens = max(work.micro_batch_tokens, work.sequence_tokens)
    work = with_tokens(work, tokens, checkpointing=work.checkpointing)
    engine = work.engine.weights(card, work)
    kv_cache = work.slots * sequence_bytes(card, work)
    if work.engine_bytes is not None:
        kv_cache = max(work.engine_bytes - engine, sequence_bytes(card, work))
    return MemoryPlan(
        weights=weight_bytes(card, work),
        engine_weights=engine,
        adapters=2 * ADAPTER_BYTES * adapter,
        gradients=((1 + MEASURED_GRADIENTS) * ADAPTER_BYTES + cast_bytes(work)) * adapter,
        optimizer=MOMENT_BYTES * adapter,
        activations=work.micro_batch_tokens * activation_bytes(card, work) + in_flight_bytes(card, work),
        logprobs=logprob_bytes(card, work.micro_batch_tokens),
        kv_cache=kv_cache,
        reserve=CUDA_RESERVE_BYTES if work.gpu else CPU_RESERVE_BYTES,
        engine=work.engine.name,
        micro_batch_tokens=work.micro_batch_tokens,
        checkpointing=work.checkpointing,
    )


def sequence_bytes(card: ModelCard, work: Workload) -> int:
    """Returns the bytes of the keys and values of one sequence of full length."""
    return 2 * card.layers * card.kv_width * work.number_bytes * work.sequence_tokens


def adapter_parameters(card: ModelCard, rank: int) -> int:
    """Returns the number of parameters in one adapter: A is [rank, in] and B is [out, rank], for every linear
    layer but the head."""
    return rank * card.linear_widths


def cast_bytes(work: Workload) -> int:
    """Returns the bytes of an adapter parameter cast to the type of the base, 0 if it has that type."""
    return work.number_bytes if work.number_bytes != ADAPTER_BYTES else 0


def weight_bytes(card: ModelCard, work: Workload) -> float:
    """Returns the bytes of the base as the trainer holds it. bitsandbytes does not quantize embedding, norms
    and head, and unpacks the layer in use."""
    if not work.nf4:
        return card.parameters * work.number_bytes
    others = card.parameters - card.linear_parameters
    unpacked = card.hidden * card.intermediate * work.number_bytes
    return card.linear_parameters * NF4_BYTES + others * work.number_bytes + unpacked


def _a_copy(card: ModelCard, work: Workload) -> float:
    return card.parameters * work.number_bytes


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The bytes that an engine holds beside the trainer's weights, without keys and values."""

    name: str
    weights: Callable[[ModelCard, Workload], float] = _a_copy
    """Bytes of its own weights, for all policies."""
    growth: Callable[[ModelCard, Workload], float] = lambda card, work: 0.0
    """Bytes of these that are not yet allocated when it has been loaded."""
    card_share: float | None = None
    """The share of a card that it takes, whatever it needs."""


def _merged_layers(card: ModelCard, work: Workload) -> float:
    """Returns the bytes of the merged layers, once per policy, and on a CPU of a packed copy of the head."""
    head = 0 if work.gpu else card.vocabulary * card.hidden * work.number_bytes
    return card.linear_parameters * work.number_bytes * work.policies + head


def _further_versions(card: ModelCard, work: Workload) -> float:
    return card.linear_parameters * work.number_bytes * (work.policies - 1 + work.guest_copies)


EMBEDDED_MEMORY = EngineMemory("embedded", _merged_layers, growth=_further_versions)
"""Memory of our own decode loop."""


def layer_bytes(card: ModelCard, work: Workload) -> int:
    """Returns the bytes that one layer keeps per token for the backward pass, with LoRA fused
    (`model/adapters/lora.py`).

    Two norms keep their input in float32. Each linear layer keeps its input, which q, k and v share, as do
    gate and up, and rank numbers. Attention keeps q, k, v, its result and one sum per head. The MLP keeps
    gate, its activation, up, and the product.
    """
    norms = 2 * 4 * card.hidden
    if card.qk_norm:
        norms += 4 * (card.query_width + card.kv_width)
    attention = card.hidden + 2 * card.query_width + 2 * card.kv_width
    mlp = card.hidden + 4 * card.intermediate
    return norms + work.number_bytes * (attention + mlp + 7 * work.rank) + 4 * card.heads


def activation_bytes(card: ModelCard, work: Workload) -> int:
    """Returns the bytes of activations per token of a micro-batch: those of all layers, or with checkpointing
    their inputs and one layer at a time."""
    full = layer_bytes(card, work)
    last = (
        4 * card.hidden + (work.number_bytes + 4) * card.hidden
    )  # final norm, hidden states, their gradient
    if not work.checkpointing:
        return card.layers * full + last
    return card.layers * card.hidden * work.number_bytes + full + last


def in_flight_bytes(card: ModelCard, work: Workload) -> int:
    """Returns the bytes of the gradients in the layer that the backward pass is at: three wide ones of its
    MLP, and two narrow ones."""
    return work.micro_batch_tokens * work.number_bytes * (3 * card.intermediate + 2 * card.hidden)


def logprob_bytes(card: ModelCard, tokens: int) -> int:
    """Returns the bytes of a chunk of logits and its gradient in float32; never [all tokens, vocabulary].

    >>> card = ModelCard("m", 0, 1, 1, 1, 1, 1, 1, vocabulary=2**15)
    >>> logprob_bytes(card, 2048) == 2 * CHUNK_BYTES
    True
    """
    chunk = max(LEAST_CHUNK_TOKENS, CHUNK_BYTES // (4 * card.vocabulary))
    return 2 * 4 * card.vocabulary * min(chunk, tokens)


def with_tokens(work: Workload, tokens: int, *, checkpointing: bool) -> Workload:
    """Returns the work with micro-batches of another size."""
    return replace(work, micro_batch_tokens=tokens, checkpointing=checkpointing)
