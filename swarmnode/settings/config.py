"""Every setting: frozen sections, and one sentence under each field.

files, environment, command line -> config_layers.py -> [config] -> everybody
"""

import math
import re
from ipaddress import IPv4Address, ip_address
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from swarmnode.registry import Kind, known

NOT_OF_A_TEMPLATE = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of apply_chat_template that the node sets, or that would turn a prompt into something else."""


SECRET = "secret"
"""Type of an error whose value may be a key or a password and must not be shown."""


class Section(BaseModel):
    """A frozen group of settings. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _one_value_is_a_list_of_one(cls, value: Any, info: ValidationInfo) -> Any:
        """Turns a single value into a list of one, so that `--set tasks.names=rev` works. Refuses true and
        false where they would be the numbers 1 and 0."""
        kind = cls.model_fields[str(info.field_name)].annotation
        is_list = get_origin(kind) is tuple
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError("true and false are not valid here")
        return (value,) if is_list and isinstance(value, str | int | float) else value


SWARM_NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
"""Pattern of a swarm's name, which stands in topics and in names of files."""


def _a_name(value: str) -> str:
    if re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]{0,79})?", value):
        return value
    raise ValueError(
        "a name has at most 80 letters, digits, '.', '_' or '-', and starts with a letter or digit"
    )


def _a_swarm_name(value: str) -> str:
    if re.fullmatch(SWARM_NAME, value):
        return value
    raise ValueError(
        "a name has at most 63 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit"
    )


def named(kind: Kind, *besides: str) -> AfterValidator:
    """Marks a setting as the name of a part: one of ours, one that is registered, or an import path."""
    return AfterValidator(lambda name: known(kind, name, *besides))


class SwarmConfig(Section):
    name: Annotated[str, AfterValidator(_a_swarm_name)] = "commons"
    """Nodes with the same swarm name exchange rollouts; others never hear each other."""


class NetworkConfig(Section):
    transport: Annotated[str, named("transport")] = "p2pd"
    """Transport of messages: p2pd (the go-libp2p daemon), or a host of your own, as mymodule:name. All nodes
    of a swarm must agree."""
    listen: str = "0.0.0.0"
    """IPv4 address to listen on. 127.0.0.1 keeps the node to this machine."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port. 0: the port this node used last time, or any free one. A port named here must be free."""
    announce: tuple[str, ...] = ()
    """Public multiaddrs to announce instead of the ones we listen on (behind a forwarded port). With several
    policies, only the first announces them."""
    map_port: bool = False
    """Ask the router to forward our port, by UPnP or NAT-PMP, and announce the forwarded address."""
    relays: tuple[str, ...] = ("auto",)
    """Relays for connections to us if nobody can dial us: multiaddrs that end in /p2p/<peer id>, or seeds, or
    none. auto: the seeds, for a member of a pipeline that neither has nor announces a public address."""
    relay_for_others: bool | None = None
    """Relay connections for peers that nobody can dial, within limits; we must be reachable. Unset: on for a
    seed that listens beyond its own machine."""
    seeds: tuple[str, ...] = ("shipped",)
    """Peers to dial first: multiaddrs that end in /p2p/<peer id>, files with one on each line, DNS names like
    /dnsaddr/example.org. shipped: the list that came with swarmnode (configs/seeds.txt)."""
    mdns: bool = True
    """Find peers in the local network by multicast DNS, in private address ranges only."""
    wait_for_peers: int = Field(default=0, ge=0)
    """Connected peers to wait for before round 1, for a minute at most, not counting other policies of this
    process. 0: start at once."""

    @field_validator("listen")
    @classmethod
    def _listen_is_ipv4(cls, text: str) -> str:
        return str(IPv4Address(text))


class PolicyConfig(Section):
    model: str = "auto"
    """auto, tiny, a folder, or a hub name of a causal LM. auto: tiny without a GPU, else by free memory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the base weights. auto: bfloat16 on a GPU that supports it, and on a CPU with AVX512-BF16
    or AMX for models of width 256 and more; else float32. A pipeline on CPUs is float32: members must
    agree."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    cpu_kernels: Annotated[str, named("kernels", "auto", "off")] = "auto"
    """Kernels on a CPU: native (ours in C, where this machine has a compiler), off, or a set of your own, as
    mymodule:name. auto: native."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank of the LoRA adapter."""
    lora_targets: tuple[str, ...] = ("auto",)
    """Layers that the adapter changes: auto (linear layers, except experts and routers), all-linear, or
    names such as ["q_proj", "v_proj"]."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4 keeps the frozen base in 4 bits (bitsandbytes), on a CUDA card or, slowly, on a CPU."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA scaling is alpha / rank."""

    chat_template: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further arguments of the tokenizer's own chat template, such as {enable_thinking = false}."""

    raw_prompts: bool = False
    """Use prompts that are plain text, or a single user message, as they are, as TRL does. Off: apply the
    chat template to them. Conversations of several messages always get it."""

    @field_validator("chat_template")
    @classmethod
    def _the_form_of_a_chat_is_ours(
        cls, options: dict[str, bool | int | float | str]
    ) -> dict[str, bool | int | float | str]:
        if taken := NOT_OF_A_TEMPLATE & options.keys():
            raise ValueError(f"{min(taken)} is reserved and cannot be set for a template")
        return options

    @field_validator("lora_targets")
    @classmethod
    def _targets_are_one_word_or_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        words = {"auto", "all-linear"} & set(names)
        if not names or not all(names) or (words and len(names) > 1):
            raise ValueError("must be auto, all-linear, or names of layers")
        return names


class JudgeConfig(Section):
    """A judge behind a URL (docs/http_judge.md), as the table [tasks.judge]."""

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = ""
    """An OpenAI-compatible endpoint such as http://localhost:8000/v1, with `model`; or an endpoint that takes
    {"prompt", "completions", "columns"} by POST and returns {"scores": [...]}. Empty: no such judge."""
    model: str = ""
    """The model that judges each answer. Empty: the URL returns scores itself."""
    prompt: str = (
        "Question:\n{prompt}\n\nAnswer:\n{completion}\n\nHow good is the answer, from 0 (wrong) to 1 (right)?"
        " Reply with one number and nothing else."
    )
    """Prompt of the model: {prompt}, {completion} and any {column} are filled in."""
    read: str = r"^\s*(\d+(?:\.\d+)?)\s*$"
    """Regular expression whose first group is the number; the last match counts."""
    lowest: float = 0.0
    """Smallest number that counts as a score."""
    highest: float = 1.0
    """Largest number that counts as a score. Numbers outside the range are ignored."""
    key_env: str = ""
    """Environment variable that holds the key. It is read for each request to the judge and never
    stored."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest reply of the model."""
    concurrency: int = Field(default=8, ge=1, le=256)
    """Simultaneous requests of one process."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit for the answers to one example, including retries and waits. After it they get no reward.
    Strangers' answers have 14 seconds at most."""
    exchangeable: bool = False
    """True if every node with this judge gets the same scores from it, so that rollouts may be shared."""

    @field_validator("url")
    @classmethod
    def _url_is_one_without_a_password(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("a URL must begin with http:// or https://")
        if parts.username or parts.password:
            raise PydanticCustomError(
                SECRET,
                "no password in a URL: put the key in a variable and name that in key_env",
            )
        return url

    @field_validator("key_env")
    @classmethod
    def _key_env_is_a_name(cls, name: str) -> str:
        if name and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise PydanticCustomError(
                SECRET, "key_env must be the name of an environment variable, not the key itself"
            )
        return name

    @field_validator("read")
    @classmethod
    def _read_has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        if not groups:
            raise ValueError(f"{pattern!r} has no group around the number")
        return pattern


class TasksConfig(Section):
    names: tuple[str, ...] = ("builtin",)
    """Built-in task names, `builtin` for all eight, task files, `package.module:attribute`, or data sets: a
    .jsonl, .csv or .parquet file, a folder of `datasets`, `hf:owner/name[/subset][:split]` of the hub; or
    a task of another kind, such as `reasoning-gym:NAME?level=2` (`swarmnode task list`)."""
    mixes: tuple[str, ...] = ()
    """The tasks of each of several policies, names joined by commas. Policy k takes entry k, starting over
    after the last; more entries than policies are refused. Empty: all policies take `names`."""
    eval_examples: int = Field(default=64, ge=1, le=1024)
    """Held-out examples per task in an evaluation, for tasks without their own evaluation set."""
    score_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """Time limit for a task file to judge the answers to one example, or to draw examples. After it the
    process is restarted, and the answers get no reward."""
    turn_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Time limit for an environment to answer one turn. After it that completion ends without a reward; the
    others continue."""
    workers: int | None = Field(default=None, ge=1, le=64)
    """Most processes of a task's code that judge our own rollouts at the same time, each started when needed.
    Unset: four, or one if it takes half a GiB or more. Strangers' rollouts have a separate process."""
    memory_mb: int | None = Field(default=None, ge=64)
    """Most MiB of memory that such a process may write to (Linux); a judgement that needs more is lost.
    Unset: no limit."""
    max_failures: int = Field(default=3, ge=1, le=1000)
    """Failed groups of a task in a row after which the node stops: its reward raises, overruns or ends its
    process. A judge behind a URL that cannot be reached counts, too. A reward that raises before it has ever
    judged a group stops the node at once."""
    sandbox: Literal["required", "optional"] = "required"
    """Isolation of programs in answers that rewards run. required: in a sandbox, or not at all if the machine
    has none; optional: if there is none, without it and with your rights, even those in strangers'
    answers."""
    reward: tuple[str, ...] = ()
    """Rewards of data sets: exact_match and other built-in ones by name, `file.py:function` or
    `package.module:function`. Empty: an answer counts when it equals the answer column."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward of `reward` in their sum, a judge behind a URL last; with 0 it is only measured.
    Empty: 1 each. For peers with other weights it is a different task."""
    system_prompt: str = ""
    """System message before every question of data sets, those of reasoning-gym included."""
    judge: JudgeConfig = JudgeConfig()
    """A judge of data sets behind a URL, as a table [tasks.judge], in addition to those in `reward`."""
    private: bool = False
    """Never announce our rollouts. Off: rollouts of data sets are shared with the number of their row, never
    its text, so only a node with the same rows can use them."""

    @model_validator(mode="after")
    def _a_judge_ends_before_its_process_is_ended(self) -> "TasksConfig":
        if self.judge.url and self.judge.timeout_s >= self.score_timeout_s:
            raise ValueError("tasks.judge.timeout_s must be below tasks.score_timeout_s")
        return self


class RolloutConfig(Section):
    groups: int = Field(default=8, ge=1, le=1024)
    """Groups generated per round. All are shared; how many are trained on depends on what peers sent."""
    group_size: int = Field(default=8, ge=2, le=64)
    """Completions per example (G)."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest completion in tokens, including the environment's messages in a conversation. Longer answers of
    others are not used."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens. Examples with longer ones are skipped, with a line in the log."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature. Training needs exploration, so it cannot be 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. 1 samples from the whole distribution."""
    slots: int = Field(default=256, ge=1, le=4096)
    """Most sequences generated at the same time."""
    engine: Annotated[str, named("engine", "auto")] = "auto"
    """Engine: embedded (our own loop), vllm, generate (transformers' own, the slowest), or an engine
    of your own, as mymodule:name. auto: vllm on a GPU if it is installed, else our own loop; `join` says
    why."""
    mode: Literal["refill", "april", "sync"] = "refill"
    """When a round ends. refill: once its groups are complete; the rest continues in the next round. april:
    as in the paper (ask for more, stop, resume). sync: once everything is complete."""
    dynamic_sampling: float = Field(default=1.0, ge=1, le=16)
    """DAPO's dynamic sampling: sample more groups until enough have a gradient, at most this multiple of the
    wanted number. 1: no extra groups."""
    first: Literal["training", "people"] = "training"
    """Priority while people ask the policy that trains (`swarmnode serve`, `swarmnode chat`). training: their
    answers get a twentieth of the engine's time, at most two seconds at once. people: their answers start
    before all others, and training pauses between micro-batches while they are written, at most a second
    each time."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Generate the next round while training on this one. auto: if memory and processors allow it."""


class ExchangeConfig(Section):
    enabled: bool = True
    """Share rollouts and train on others'. Off: no network at all; see `rule` for what remains."""
    local_groups: int = Field(default=4, ge=0)
    """I: own groups to train on per round (SAPO section 3; 4/4 won the paper's comparison), under rules in
    which external groups replace own ones; book and own_book train on all groups of a round."""
    external_groups: int = Field(default=4, ge=0)
    """J: other nodes' groups to learn from per round. Under rules in which they replace own groups
    (exchange.rule), missing ones are filled up with own groups."""
    rule: Annotated[str, named("rule")] = "book"
    """How to learn from others. book: keep verified right answers, own and foreign, and replay them where we
    fail; own_book: only our own, nothing is fetched; sapo: train on foreign groups as on own ones;
    successes: the same without foreign failures; or a rule of your own, as mymodule:name. A pipeline
    supports sapo and treats the others as successes; with enabled=false, book becomes own_book and the others
    except own_book become plain GRPO."""
    help: float = Field(default=0.125, ge=0, le=0.5)
    """Share of a round's examples that may be requests for help from nodes that had no right answer: at least
    one if any node asks. 0: none, and we do not ask either. A pipeline has none."""
    library: bool = True
    """Keep the groups with answers in the book of rule=book, as signed by their authors, for peers that ask;
    and at a start, and again when nothing is ever right, ask several peers for theirs, and catch up by
    replaying them. Off: neither."""
    upload_mb_per_s: float = Field(default=2.0, gt=0)
    """Upload limit for bodies, our own and those passed on for others, in megabytes per second, on
    average."""
    download_mb_per_s: float | None = Field(default=None, gt=0)
    """Download limit for bodies and library pages, in megabytes per second, on average. Unset: no limit."""


class TrainingConfig(Section):
    loss: Annotated[str, named("loss")] = "dapo"
    """The objective and its advantages. dapo averages over tokens, grpo over answers first, dr_grpo divides
    by a constant, gspo clips whole answers, cispo keeps clipped tokens, rloo compares with the other answers.
    Or your own loss, as mymodule:name. Each has its own clip."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW learning rate of the adapter."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule until node.rounds, which linear and cosine need: constant, falling linearly, or
    along half a cosine."""
    warmup_rounds: int = Field(default=0, ge=0)
    """Rounds over which the learning rate rises to its full value. 0: no warmup."""
    inner_epochs: int = Field(default=1, ge=1, le=64)
    """Passes of a round over the same answers, each in a different order. The clipped ratio is always against
    the policy before the round. Answers from the book are repeated without a clip."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm of one optimizer step."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the base model. 0: no KL term and no forward pass for it."""
    sequences_per_step: int = Field(default=128, ge=1)
    """The most completions of groups per optimizer step. Answers from the book are spread over the steps in
    addition; a round has a step for every 64 of them, however few its groups are."""
    micro_batch_tokens: int | None = Field(default=None, ge=16, le=1 << 20)
    """Tokens, padding included, in one forward pass. Unset: from free memory. Halved automatically when
    memory runs out. In a pipeline it must be the same for all members; unset, it is 1024."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass. auto: if the longest sequence would not fit otherwise."""


CLOCK = r"(?:(?:[01]?[0-9]|2[0-3])(?::[0-5][0-9])?|24)"
"""Pattern of a time of the day: 7, 07:30, 24."""


def _hours(value: str) -> str:
    if re.fullmatch(f"({CLOCK}-{CLOCK})?", value):
        return value
    raise ValueError("write one range of hours from 0 to 24, such as 22-7 or 8:30-17")


def _share(value: Any) -> Any:
    try:
        share = float(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else float(value)
    except (TypeError, ValueError):
        share = math.nan
    if 0.05 <= share <= 1:
        return share
    raise ValueError("write a share from 5% to 100%, such as 60% or 0.6")


class LimitsConfig(Section):
    """Limits of a node on a machine that is also used for other things (extensions/limits/)."""

    hours: Annotated[str, AfterValidator(_hours)] = ""
    """Hours of the day, by this machine's clock, in which rounds may start: 22-7, or 8:30-17. Empty: all."""
    programs: tuple[str, ...] = ()
    """Names of programs; no round starts while one of them runs."""
    give_way: bool | None = None
    """Start no round while a program other than swarmnode keeps the card busy, according to nvidia-smi, or
    while this machine runs on battery. Unset: on if node.rounds is unset, as someone may be waiting for a
    run that ends."""
    temperature: float | None = Field(default=None, gt=20, le=120)
    """Start no round while the card, or the CPU if no card is used, is hotter than this in degrees Celsius;
    resume 8 degrees below. Unset: no limit."""
    power: Annotated[float, BeforeValidator(_share)] = Field(default=1.0, ge=0.05, le=1)
    """Share of the time that rounds may take, such as 60% or 0.6: the node rests after each. This lowers the
    average power, not the power during a round: for that use `nvidia-smi -pl` as root."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory limit in GiB for model, training and answers, or for a pipeline stage, on the card if one is
    used. What cannot fit is refused before it is loaded. Unset: all free memory; three quarters of it for a
    stage."""
    disk_gb: float | None = Field(default=None, gt=0)
    """Disk limit in GiB for this node's home. Above it the oldest checkpoints are deleted first, but never
    the newest and the best of a run; then saved rollouts of other runs; then rounds wait. Unset: no limit."""


class PipelineConfig(Section):
    name: Annotated[str, AfterValidator(lambda name: name and _a_swarm_name(name))] = ""
    """Train one larger model together with the other members of this pipeline. Empty: train a model alone."""
    data: bool = True
    """Be available for stage 0, which draws tasks, sees texts and losses, and holds embedding and head."""
    members: tuple[str, ...] = ()
    """Peer ids that may be members; "anyone": every node in the swarm. Empty: every node in a private swarm,
    or on this machine; a public swarm is refused."""
    wait_for_members: int = Field(default=2, ge=1, le=512)
    """Members, ourselves included, to wait for before the first plan."""
    stages: int | None = Field(default=None, ge=1, le=64)
    """Number of parts the model is split into. Unset: the fastest number by the members' measurements."""
    skip: float = Field(default=0.0, ge=0, lt=1)
    """Share of the stages that a micro-batch skips. Above 0 it is faster, at some loss of quality per
    token."""
    slots: int = Field(default=3, ge=1, le=64)
    """Micro-batches that a member keeps between their forward and backward pass."""
    trainable: Literal["lora", "full"] = "lora"
    """Train an adapter on each stage, or all of its weights."""
    text: str = ""
    """Folder of text files to train on by cross-entropy, instead of tasks and rewards."""


SHORTEST_PASSWORD = 8

DESKTOP = "desktop"
"""The value of node.notify for notices on the screen."""


def _can_be_posted_to(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_port = parts.port != 0  # Raises ValueError for an invalid port.
    except ValueError:
        return False
    is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
    return is_port and is_web and url.isascii() and "@" not in parts.netloc


def is_loopback(host: str) -> bool:
    """Returns True for a name or an address that only this machine reaches.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class NodeConfig(Section):
    seed: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Seed of draws, sampling and adapter. Unset: from the peer id, so that nodes ask different questions."""
    rounds: int | None = Field(default=None, ge=0)
    """Stop after this many rounds of the run, counted over all starts. Unset: run until stopped."""
    run: Annotated[str, AfterValidator(_a_name)] = ""
    """Name of the run to continue or to start. Unset: the run with the same model, tasks and rewards, or a
    new one if they differ; for evaluations and exports, the one written to last."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Rounds between checkpoints. One is also written after every evaluation and at every clean stop."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Checkpoints kept; older ones are deleted, but never the one with the best evaluation."""
    learner: Annotated[str, named("learner")] = "local"
    """Learner: local, or your own class, as mymodule:name. A pipeline has its own learner."""
    policies: int = Field(default=1, ge=1, le=16)
    """Policies that this node trains on one base model, each with its own identity, seed and adapter."""
    eval_every: int = Field(default=20, ge=0)
    """Rounds between evaluations on held-out draws or the tasks' own evaluation sets; 64 draws take about as
    long as generating a round. 0: only at the first start and at the end."""
    monitors: tuple[str, ...] = ()
    """Trackers that get the numbers of every round, besides state/logs/metrics.jsonl: tensorboard, trackio,
    wandb, or your own as mymodule:name."""
    page: Annotated[str, named("page", "off")] = "web"
    """Page of a running node, for people, commands and Prometheus: web, off, or your own as
    mymodule:name."""
    http: str = "127.0.0.1"
    """Address that the page listens on. Any but this machine's loopback needs node.http_password."""
    http_password: SecretStr = SecretStr("")
    """Password of the page, for any user name. Best set as the variable SWARMNODE_NODE__HTTP_PASSWORD."""
    notify: SecretStr = SecretStr("")
    """Where to send a notice when this node is stuck, cannot write a checkpoint or stops with an error:
    desktop (by notify-send), or an http or https URL that {"text": ...} is posted to. Empty: nowhere."""
    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of the page. 0: any free one; `swarmnode status` finds it. Policy k adds k."""

    @field_validator("monitors")
    @classmethod
    def _monitors_are_known_or_can_be_imported(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known("monitor", name) for name in names)

    @field_validator("notify")
    @classmethod
    def _notices_go_to_the_desktop_or_a_url(cls, to: SecretStr) -> SecretStr:
        if to.get_secret_value() not in ("", DESKTOP) and not _can_be_posted_to(to.get_secret_value()):
            raise PydanticCustomError(
                SECRET, "node.notify must be desktop, or an ASCII http or https URL without user and password"
            )
        return to

    @model_validator(mode="after")
    def _a_page_for_other_machines_has_a_password(self) -> "NodeConfig":
        password = self.http_password.get_secret_value()
        if password and len(password) < SHORTEST_PASSWORD:
            raise PydanticCustomError(
                SECRET, "node.http_password needs at least {least} characters", {"least": SHORTEST_PASSWORD}
            )
        if not password and not is_loopback(self.http):
            raise PydanticCustomError(
                SECRET, "other machines can reach node.http: set node.http_password, or leave it at 127.0.0.1"
            )
        return self


class Config(Section):
    """All settings of a node, by section (docs/settings.md)."""

    swarm: SwarmConfig = SwarmConfig()
    network: NetworkConfig = NetworkConfig()
    policy: PolicyConfig = PolicyConfig()
    tasks: TasksConfig = TasksConfig()
    rollout: RolloutConfig = RolloutConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    training: TrainingConfig = TrainingConfig()
    limits: LimitsConfig = LimitsConfig()
    pipeline: PipelineConfig = PipelineConfig()
    node: NodeConfig = NodeConfig()

    @model_validator(mode="after")
    def _a_pipeline_has_one_run(self) -> "Config":
        if self.pipeline.name and self.node.run:
            raise ValueError("node.run does not apply to a pipeline, which has a single run")
        return self

    @model_validator(mode="after")
    def _a_member_of_a_pipeline_does_not_let_others_wait(self) -> "Config":
        given = [name for name in self.limits.model_fields_set if name != "memory_gb"]
        if self.pipeline.name and self.limits != LimitsConfig(memory_gb=self.limits.memory_gb):
            raise ValueError(
                f"in a pipeline all members would wait for one that pauses: leave out"
                f" {', '.join(f'limits.{name}' for name in given)}; limits.memory_gb"
                " bounds a stage's memory, and `swarmnode stop` stops a member when its machine is needed"
            )
        return self

    @model_validator(mode="after")
    def _enough_groups_to_train_on(self) -> "Config":
        wanted = self.exchange.local_groups + self.exchange.external_groups
        if self.exchange.enabled and wanted == 0:
            raise ValueError(
                "exchange.local_groups and exchange.external_groups are both 0: nothing to train on"
            )
        return self

    @model_validator(mode="after")
    def _a_schedule_that_ends_has_an_end(self) -> "Config":
        if self.training.schedule != "constant" and self.node.rounds is None:
            raise ValueError(f"training.schedule = {self.training.schedule} needs node.rounds")
        return self


SECTIONS: dict[str, type[Section]] = {
    name: type(field.default) for name, field in Config.model_fields.items()
}
KEYS = tuple(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields)


def explain_setting(key: str) -> str:
    """Returns the sentence under a setting.

    >>> explain_setting("network.mdns")
    'Find peers in the local network by multicast DNS, in private address ranges only.'
    """
    section, _, name = key.partition(".")
    return " ".join((SECTIONS[section].model_fields[name].description or "").split())
