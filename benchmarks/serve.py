"""What it costs to talk to a policy while it trains, and whether the version that answers is the one it says.

python benchmarks/serve.py [--quick] [--json FILE]

One node on loopback trains the tiny policy; OpenAI's own client asks `swarmnode serve` beside it.

training_slowdown_idle: seconds of a round while `serve` runs and nobody asks, over those without it, less 1;
    the median over neighbouring windows, some with and some without.
first_token_ratio: median seconds to the first token while the node trains, over those while it is paused, in
    turns; with rollout.first=people beside it.
requests_lost, wrong_version: 200 greedy questions of four clients to `policy`, its newest versions by number
    and `base`, while the policy is updated all the time. Each answer is scored again under the checkpoint of
    the version that it names; wrong is one whose log-probabilities are not those.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import openai
from common import MODELS, arguments, report

from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.node.building.page_client import ask_page
from tests import joined_node
from tests.joined_node import JoinedNode

QUESTIONS = [f"reverse {word}" for word in ("abcde", "swarm", "nodes", "learn", "token", "serve", "policy")]
CLIENTS = 4
MOST_TOKENS = 24
TRIES = 3
"""Names of a version that one client tries, each out of a new list."""
SAME = 2e-3
"""Most difference of a log-probability that is computed again in another batch."""


@dataclass(frozen=True)
class Reply:
    """One answer, to be scored again."""

    model: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@contextmanager
def training(folder: Path, *settings: str) -> Iterator[JoinedNode]:
    """A node that trains alone."""
    model = build_tiny(MODELS)
    options = ("exchange.enabled=false", "node.eval_every=0", "tasks.eval_examples=1", *settings)
    sets = [part for one in options for part in ("--set", one)]
    node = JoinedNode(folder, "--model", str(model), "--preset", "tiny", "--seed", "1", *sets)
    try:
        node.until_round(3)
        yield node
    finally:
        node.end()


@contextmanager
def serving(node: JoinedNode) -> Iterator[openai.OpenAI]:
    """`swarmnode serve` beside the node, and a client of it."""
    with (
        joined_node.serving(node.home) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", timeout=120) as client,
    ):
        yield client


# ---- what it costs ----


def round_ends(node: JoinedNode) -> list[float]:
    """Times at which the rounds so far ended."""
    lines = (node.paths.logs / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["time"] for row in rows if row["event"] == "round"]


def seconds_of_a_round(node: JoinedNode, window_s: float) -> float:
    """Median seconds of a round in a window that begins now."""
    begun = time.time()
    time.sleep(window_s)
    ends = [end for end in round_ends(node) if end >= begun]
    return statistics.median(later - end for end, later in pairwise(ends))


def slowdowns(node: JoinedNode, windows: int, window_s: float) -> list[float]:
    """The slowdown of each pair of neighbouring windows."""
    found: list[float] = []
    for number in range(windows):
        seconds: dict[bool, float] = {}
        for on in (True, False) if number % 2 else (False, True):
            if on:
                with serving(node) as client:
                    client.models.list()
                    seconds[on] = seconds_of_a_round(node, window_s)
            else:
                seconds[on] = seconds_of_a_round(node, window_s)
        found.append(seconds[True] / seconds[False] - 1)
        print(f"window {number}: {seconds[False]:.3f} s a round alone, {seconds[True]:.3f} s with serve")
    return found


def first_token_s(client: openai.OpenAI) -> float:
    started = time.perf_counter()
    question = [{"role": "user", "content": QUESTIONS[0]}]
    stream = client.chat.completions.create(
        model="policy", messages=question, max_tokens=MOST_TOKENS, stream=True
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            found = time.perf_counter() - started
            for _ in stream:
                pass
            return found
    return time.perf_counter() - started


def first_tokens(node: JoinedNode, turns: int, asked: int) -> tuple[list[float], list[float]]:
    """Seconds to first tokens while the node trains, and while it is paused."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with serving(node) as client:
        first_token_s(client)
        for number in range(2 * turns):
            trains = number % 2 == 0
            control(node, "resume" if trains else "pause")
            node.until(lambda trains=trains: (node.status()["phase"]["name"] == "paused") != trains)
            for _ in range(asked):
                seconds[trains].append(first_token_s(client))
                time.sleep(0.05)
    control(node, "resume")
    return seconds[True], seconds[False]


def control(node: JoinedNode, request: str) -> None:
    ask_page(node.running(), "/control", node.paths, {"request": request, "for_s": None})


# ---- who answers ----


def ask_many(client: openai.OpenAI, requests: int) -> list[Reply | None]:
    """Replies of several clients at once; None: a question without a whole answer."""

    def one(number: int) -> Reply | None:
        for _ in range(TRIES):
            try:
                names = [model.id for model in client.models.list()]
                # The newest two: older ones may be gone before the question is there.
                model = ("policy", names[1], names[2], "base")[number % 4]
                return reply_of(client, model, QUESTIONS[number % len(QUESTIONS)])
            except openai.NotFoundError as error:
                # Rounds of 0.07 s: a version is gone in 0.4. Who named it asks for a newer one.
                print(f"request {number}: {error}")
            except openai.OpenAIError as error:
                print(f"request {number}: {error}")
                return None
        return None

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(requests)))


def reply_of(client: openai.OpenAI, model: str, question: str) -> Reply:
    more: dict[str, Any] = {"return_token_ids": True}
    answer = client.completions.create(
        model=model, prompt=question, max_tokens=MOST_TOKENS, temperature=0, logprobs=0, extra_body=more
    )
    [choice] = answer.choices
    assert choice.finish_reason in ("stop", "length") and choice.logprobs is not None
    ids, prompt = choice.model_extra or {}, answer.model_extra or {}
    logprobs = choice.logprobs.token_logprobs or []
    named = model if "@" in model or model == "base" else answer.model
    assert answer.model == named, f"{model} was asked, {answer.model} answered"
    return Reply(
        answer.model, tuple(prompt["prompt_token_ids"]), tuple(ids["token_ids"]), tuple(map(float, logprobs))
    )


def distances(node: JoinedNode, replies: Sequence[Reply]) -> tuple[list[float], list[float]]:
    """How far each reply's log-probabilities are from those of the version that it names, and from those of
    the version before that."""
    import torch

    from swarmnode.model.base_model import load_base_model
    from swarmnode.model.policy import Policy
    from swarmnode.settings.config import PolicyConfig
    from swarmnode.training.checkpoints.checkpoint import read_checkpoint

    config = PolicyConfig()
    base = load_base_model(str(build_tiny(MODELS)), config)
    policy = Policy(base, config, 0)
    read = [read_checkpoint(folder) for folder in node.paths.checkpoints.glob("*/round-*")]
    adapters = {one.state.policy_version: one.adapter for one in read}

    def apart(reply: Reply, version: int | None) -> float:
        if version is not None:
            policy.load_adapter(adapters[version])
        ids = torch.tensor([[*reply.prompt_ids, *reply.token_ids]])
        bare = policy.peft_model.disable_adapter() if version is None else nullcontext()
        with torch.no_grad(), bare:
            logits = policy.peft_model(input_ids=ids).logits[0, len(reply.prompt_ids) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
        return float((exact - torch.tensor(reply.logprobs)).abs().max())

    own: list[float] = []
    before: list[float] = []
    for reply in replies:
        version = None if reply.model == "base" else int(reply.model.partition("@")[2])
        if version is not None and version not in adapters:
            continue  # On a busy machine a round may end before the checkpoint of the one before is written.
        own.append(apart(reply, version))
        if version is not None and version - 1 in adapters:
            before.append(apart(reply, version - 1))
    return own, before


def main() -> None:
    options = arguments("the cost of talking to a policy while it trains, and who answers")
    windows, window_s = (3, 6.0) if options.quick else (10, 12.0)
    turns, asked = (2, 10) if options.quick else (5, 20)
    requests = 60 if options.quick else 200
    with tempfile.TemporaryDirectory(prefix="swarmnode-serve-") as name:
        folder = Path(name)
        # What is measured must not change: a policy that hardly learns gives answers of one length.
        with training(folder / "cost", "training.learning_rate=1e-7") as node:
            slow = slowdowns(node, windows, window_s)
            busy, idle = first_tokens(node, turns, asked)
        with training(folder / "people", "training.learning_rate=1e-7", "rollout.first=people") as node:
            people, alone = first_tokens(node, turns, asked)
        every = ("node.checkpoint_every=1", "node.keep_checkpoints=100000", "training.learning_rate=3e-3")
        with training(folder / "who", *every) as node:
            begun = node.status()["progress"]["policy_version"]
            with serving(node) as client:
                replies = ask_many(client, requests)
            updates = node.status()["progress"]["policy_version"] - begun
            node.until_round(node.status()["progress"]["round"] + 2)
            answered = [reply for reply in replies if reply is not None]
            own, before = distances(node, answered)
    ratio = statistics.median(busy) / statistics.median(idle)
    print(
        f"first token: {statistics.median(idle) * 1e3:.1f} ms paused, {statistics.median(busy) * 1e3:.1f} ms"
    )
    print(f"{len(answered)} of {requests} answered over {updates} updates, {max(own):.1e} apart at most;")
    print(f"from the version before {statistics.median(before):.1e} in the median")
    slow_down = statistics.median(slow)
    report(
        "serve",
        claims={
            "training_slowdown_idle": slow_down,
            "first_token_ratio": ratio,
            "requests_lost": requests - len(answered),
            "wrong_version": sum(distance > SAME for distance in own),
        },
        spread={
            "training_slowdown_idle": (min(slow), max(slow)),
            "first_token_ratio": tuple(
                q / statistics.median(idle) for q in statistics.quantiles(busy, n=10)[::8]
            ),
        },
        json_path=options.json,
        extra={
            "first_token_ratio_people_first": round(statistics.median(people) / statistics.median(alone), 3),
            "first_token_s": round(statistics.median(busy), 4),
            "first_token_paused_s": round(statistics.median(idle), 4),
            "requests": requests,
            "updates": updates,
            "compared": len(own),
            "largest_difference": max(own),
            "difference_from_the_version_before": statistics.median(before),
        },
    )


if __name__ == "__main__":
    main()
