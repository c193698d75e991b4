"""Judges behind a URL, asked over loopback: what they say, what they do not, and what they must not learn."""

import json
import sqlite3
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import ValidationError

from swarmnode.errors import ConfigError, TaskError
from swarmnode.extensions.http_judge.http_judge import (
    MAX_REPLY_BYTES,
    MISSES_A_LINE,
    TRIES_TO_REACH,
    HttpJudge,
    filled_in,
)
from swarmnode.extensions.http_judge.judgement_cache import AGAIN_S, JudgementCache
from swarmnode.settings.config import JudgeConfig, TasksConfig
from swarmnode.settings.config_layers import load_config
from swarmnode.tasks.data_settings import specs_of
from swarmnode.tasks.deadlines.work_clock import WorkClock, on_the_clock
from swarmnode.tasks.judging.rewards import load_reward
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes.isolated_task import isolate
from swarmnode.tasks.task import is_exchangeable

KEY = "sk-very-secret"

Answer = tuple[int, dict[str, str], Any]
"""Status, headers, body: bytes, or what becomes JSON."""


def chat(said: str) -> Answer:
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": said}}], "usage": {}}


@dataclass
class Judging:
    """A server whose answers a test decides."""

    url: str = ""
    answer: Callable[[dict[str, Any]], Answer] = lambda body: chat("1")
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def says(self, *answers: Answer) -> None:
        """These, one after the other, and the last again and again."""
        left = list(answers)
        self.answer = lambda body: left.pop(0) if len(left) > 1 else left[0]


@pytest.fixture
def judging() -> Iterator[Judging]:
    judging = Judging()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            judging.asked.append(body)
            judging.headers.append(dict(self.headers))
            judging.paths.append(self.path)
            status, headers, said = judging.answer(body)
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    judging.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield judging
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Time:
    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def judge(judging: Judging, tmp_path: Path) -> Callable[..., HttpJudge]:
    def made(time: Time | None = None, **settings: Any) -> HttpJudge:
        time = time or Time()
        config = JudgeConfig(**{"url": judging.url, **settings})
        return HttpJudge(config, tmp_path / "cache" / "judgements.sqlite", time, time.sleep)

    return made


def test_a_model_is_asked_about_each_answer_and_its_number_is_read(judging: Judging, judge) -> None:
    judging.answer = lambda body: chat("1" if "four" in body["messages"][0]["content"] else " 0.25\n")
    asks = judge(model="m", prompt="{prompt} {completion} {answer}", concurrency=1)
    assert asks(["2+2?"] * 2, ["five", "four"], answer=["4", "4"]) == [0.25, 1.0]
    assert [body["messages"][0]["content"] for body in judging.asked] == ["2+2? five 4", "2+2? four 4"]
    assert judging.asked[0]["model"] == "m" and set(judging.paths) == {"/chat/completions"}


def test_a_scorer_gets_a_group_at_once_and_gives_a_number_or_null_for_each(judging: Judging, judge) -> None:
    judging.says((200, {}, {"scores": [0.5, None]}))
    assert judge()(["?"] * 2, ["a", "b"], answer=["x"] * 2, odd=[object()] * 2) == [0.5, None]
    assert judging.asked == [{"prompt": "?", "completions": ["a", "b"], "columns": {"answer": "x"}}]


def test_messages_are_read_as_their_text(judging: Judging, judge) -> None:
    asks = judge(model="m", prompt="{prompt}|{completion}")
    said = [{"role": "assistant", "content": "four"}]
    assert asks([[{"role": "user", "content": "2+2?"}]], [said]) == [1.0]
    assert judging.asked[0]["messages"][0]["content"] == "2+2?|four"


def test_nothing_is_asked_twice_by_any_process(judging: Judging, judge) -> None:
    assert judge(model="m")(["?"], ["a"]) == judge(model="m")(["?"], ["a"]) == [1.0]
    assert len(judging.asked) == 1
    judge(model="other")(["?"], ["a"])
    judge(model="m", highest=2.0)(["?"], ["a"])
    assert len(judging.asked) == 3, "another judge says something else"


def test_a_busy_judge_is_asked_again_after_what_it_says(judging: Judging, judge) -> None:
    time = Time()
    judging.says((429, {"Retry-After": "7"}, b""), (503, {}, b""), chat("0.5"))
    assert judge(time, model="m")(["?"], ["a"]) == [0.5]
    assert time.slept[0] == 7.0 and 0.5 <= time.slept[1] <= 1.0


def test_what_could_not_be_had_in_time_is_unknown(judging: Judging, judge, caplog) -> None:
    time = Time()
    judging.says((429, {"Retry-After": "50"}, b""))
    assert judge(time, model="m", timeout_s=60.0)(["?"], ["a"]) == [None]
    assert time.now == 50.0 and "gave no score: status 429" in caplog.text
    judging.says(chat("1"))
    assert judge(model="m")(["?"], ["a"]) == [1.0], "what is unknown are not cached"


def test_no_judge_is_waited_for_longer_than_anybody_waits_for_us(judging: Judging, judge) -> None:
    """Of a stranger's group the process has less time than the setting says."""
    time = Time()
    judging.says((429, {"Retry-After": "20"}, b""))

    def asked() -> list[float | None]:
        on_the_clock(WorkClock(15.0, time))
        return judge(time, model="m", timeout_s=60.0)(["?"], ["a"])

    assert copy_context().run(asked) == [None]
    assert time.now == 0.0


@pytest.mark.parametrize("model", ["", "m"])
def test_a_judge_that_is_not_there_is_tried_so_many_times_and_then_a_failure(judge, model: str) -> None:
    time = Time()
    with pytest.raises(TaskError, match=r"at http://127\.0\.0\.1:1\S* cannot be reached: .*refused") as told:
        judge(time, url="http://127.0.0.1:1", model=model)(["?"], ["a"])
    assert len(time.slept) == TRIES_TO_REACH - 1 and "tasks.judge.url" in told.value.hint


def test_a_judge_that_is_lost_in_the_middle_of_a_group_has_judged_the_first_half(
    judging: Judging, judge, monkeypatch
) -> None:
    asks = judge(model="m", concurrency=1)

    def answered_once(body: dict[str, Any]) -> Answer:
        monkeypatch.setattr(HttpJudge, "endpoint", "http://127.0.0.1:1")
        return chat("1")

    judging.answer = answered_once
    assert asks(["?"] * 2, ["a", "b"]) == [1.0, None]
    with pytest.raises(TaskError, match="cannot be reached"):
        asks(["?"] * 2, ["c", "d"])


def test_a_judge_that_gives_no_score_is_told_of_once_and_then_by_count(
    judging: Judging, judge, caplog
) -> None:
    judging.says(chat("it is good"))
    judge(model="m", concurrency=1)(["?"] * (MISSES_A_LINE + 1), [str(n) for n in range(MISSES_A_LINE + 1)])
    first, second = caplog.messages
    assert "gave no score: no number" in first and f"(to {MISSES_A_LINE + 1} requests so far)" in second


NONSENSE = {
    "no JSON": (200, {}, b"<html>"),
    "no choice": (200, {}, {"choices": []}),
    "no text": (200, {}, {"choices": [{"message": {"content": None}}]}),
    "no number": chat("it is good"),
    "more than a number": chat("I give 1"),
    "out of range": chat("1000000"),
    "endless": (200, {}, b" " * (MAX_REPLY_BYTES + 1)),
    "nested": (200, {}, b"[" * 100_000),
}


@pytest.mark.parametrize("reply", NONSENSE.values(), ids=NONSENSE)
def test_what_a_model_says_is_believed_in_its_form_and_range_only(
    judging: Judging, judge, reply: Answer
) -> None:
    judging.says(reply)
    assert judge(model="m")(["?"], ["a"]) == [None]


def test_a_match_without_a_number_is_none(judging: Judging, judge) -> None:
    judging.says(chat("score 1, or n/a"), *[chat("n/a")] * 9)
    assert judge(model="m", read=r"score (\d)|n/a", concurrency=1)(["?", "?"], ["a", "b"]) == [1.0, None]


@pytest.mark.parametrize("scores", ["[1]", "[1, 2]", '[1, "1"]', "[1, true]", "[1, NaN]", "[1, 1e999]", "{}"])
def test_scores_are_believed_in_their_form_and_range_only(judging: Judging, judge, scores: str) -> None:
    judging.says((200, {}, f'{{"scores": {scores}}}'.encode()))
    assert judge()(["?"] * 2, ["a", "b"]) == [None, None]


def test_the_key_is_read_from_the_environment_and_never_shown(
    judging: Judging, judge, monkeypatch, caplog
) -> None:
    asks = judge(model="m", key_env="JUDGE_KEY", url=f"{judging.url}/v1?version=1")
    with pytest.raises(TaskError, match="JUDGE_KEY, which holds the key of the judge, is not set"):
        asks(["?"], ["a"])
    monkeypatch.setenv("JUDGE_KEY", KEY)
    assert asks(["?"], ["a"]) == [1.0]
    assert judging.headers[0]["Authorization"] == f"Bearer {KEY}"
    judging.says((401, {}, f"no such key: {KEY}".encode()))
    with pytest.raises(TaskError, match="refused it with status 401: no such key: ") as refused:
        asks(["?"], ["b"])
    assert KEY not in f"{refused.value} {caplog.text} {asks!r} {asks.config.model_dump_json()}"


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n", "\n\n"])
def test_a_key_out_of_a_file_is_used_without_its_line_break(
    judging: Judging, judge, monkeypatch, end: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}{end}")
    assert judge(model="m", key_env="JUDGE_KEY")(["?"], ["a"]) == [1.0]
    assert judging.headers[0]["Authorization"] == f"Bearer {KEY}"


ODD_KEYS = [f"{KEY}\nX-Other: 1", f"{KEY}\r{KEY}", f"{KEY}\x07{KEY}", f"{KEY} {KEY}", f"{KEY}\u2013", "\n"]


def told_by_a_node(questions: Path, config: dict[str, Any]) -> str:
    """All that a node would print or log of a judge, which is asked in a process of the task."""
    told: list[str] = []
    before = set(threading.enumerate())
    spec = f"{questions}?judge={quote(json.dumps({'model': 'm', 'timeout_s': 2, **config}))}"
    with isolate(spec, 60.0, printed=told.append) as task:
        try:
            told.append(repr(task.score(next(iter(task.examples(0))), ["a"])))
        except TaskError as error:
            told.append("".join(traceback.format_exception(error)))
    # What the process printed may come after what it answered.
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    return "\n".join(told)


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path))
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    return path


@pytest.mark.parametrize("key", ODD_KEYS)
def test_a_key_that_no_header_takes_is_an_error_that_does_not_show_it(
    judging: Judging, questions: Path, monkeypatch, key: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    told = told_by_a_node(questions, {"url": judging.url, "key_env": "JUDGE_KEY"})
    assert "JUDGE_KEY" in told and KEY not in told
    assert judging.asked == []


HOSTILE = {
    "its status line": lambda auth: b"%s nonsense\r\n\r\n" % auth,
    "a header": lambda auth: b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n" % auth,
    "a number": lambda auth: http_reply(200, {"choices": [{"message": {"content": auth.decode()}}]}),
    "a refusal": lambda auth: http_reply(403, auth.decode()),
    "a redirect": lambda auth: b"HTTP/1.1 302 Found\r\nLocation: http://h/%s\r\n\r\n" % auth,
}


def http_reply(status: int, said: Any) -> bytes:
    body = json.dumps(said).encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize("reply", HOSTILE.values(), ids=HOSTILE)
def test_a_judge_that_says_the_key_back_has_it_in_no_log(
    questions: Path, monkeypatch, reply: Callable[[bytes], bytes]
) -> None:
    key = "sk-'very\\\"secret"

    class Echo(StreamRequestHandler):
        def handle(self) -> None:
            lines = {}
            while (line := self.rfile.readline()).strip():
                name, _, value = line.partition(b": ")
                lines[name.lower()] = value.strip()
            self.rfile.read(int(lines[b"content-length"]))
            assert key.encode() in lines[b"authorization"]
            self.wfile.write(reply(lines[b"authorization"]))

    monkeypatch.setenv("JUDGE_KEY", key)
    with ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        told = told_by_a_node(questions, {"url": url, "key_env": "JUDGE_KEY"})
        server.shutdown()
        thread.join()
    assert "the judge at http://127.0.0.1" in told
    assert "very" not in told and "secret" not in told


@pytest.mark.parametrize("config", [{"url": f"https://me:{KEY}@judge.example"}, {"key_env": KEY}])
def test_a_secret_in_the_wrong_setting_is_not_shown(
    questions: Path, monkeypatch, config: dict[str, str]
) -> None:
    url = config.get("url", "https://judge.example")
    spec = f"{questions}?judge={quote(json.dumps({'url': url, **config}))}"
    with pytest.raises(TaskError) as of_spec:
        load_task(spec)
    ((name, said),) = config.items()
    with pytest.raises(ConfigError) as of_settings:
        load_config(environ={}, assignments=[f"tasks.judge={{{name} = {json.dumps(said)}}}"])
    with pytest.raises(ValidationError) as of_script:
        JudgeConfig(**config)
    for error in (of_spec, of_settings, of_script):
        told = "".join(traceback.format_exception(error.value))
        assert "environment variable" in told or "key_env" in told
        assert KEY not in told


def test_a_redirect_is_not_followed_with_the_key(judging: Judging, judge, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judging.says((302, {"Location": f"{judging.url}/elsewhere"}, b""))
    with pytest.raises(TaskError, match="refused it with status 302"):
        judge(model="m", key_env="JUDGE_KEY")(["?"], ["a"])
    assert judging.paths == ["/chat/completions"]


def test_so_many_requests_are_under_way_at_once(judging: Judging, judge) -> None:
    together, inside, most = threading.Barrier(2), [], []

    def answer(body: dict[str, Any]) -> Answer:
        inside.append(1)
        together.wait(30)
        most.append(len(inside))
        together.wait(30)
        inside.pop()
        return chat("1")

    judging.answer = answer
    assert judge(model="m", concurrency=2)(["?"] * 6, [*"abcdef"]) == [1.0] * 6
    assert max(most) == 2


def test_an_answer_cannot_fill_in_what_the_template_names() -> None:
    assert filled_in("{completion} {answer}", {"completion": "{answer}", "answer": "4"}) == "{answer} 4"
    with pytest.raises(TaskError, match=r"names \{solution\}"):
        filled_in("{solution}", {"completion": "a"})


def test_the_cache_is_bounded_and_a_damaged_one_is_done_without(tmp_path: Path, caplog) -> None:
    cache = JudgementCache(tmp_path / "some.sqlite", most=3)
    for number in range(10):
        cache.put(bytes([number]), b"said")
    assert [number for number in range(10) if cache.get(bytes([number]))] == [7, 8, 9]
    (tmp_path / "damaged.sqlite").write_bytes(b"no database" * 1000)
    damaged = JudgementCache(tmp_path / "damaged.sqlite", most=3)
    damaged.put(b"key", b"said")
    assert damaged.get(b"key") is None and "are not cached" in caplog.text


def test_a_cache_that_another_process_holds_is_used_again_later(tmp_path: Path, caplog) -> None:
    time, path = Time(), tmp_path / "shared.sqlite"
    cache = JudgementCache(path, most=3, clock=time, busy_s=0.01)
    cache.put(b"a", b"1")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        cache.put(b"b", b"2")
        assert cache.get(b"a") is None, "nobody waits for it with each judgement"
        other.execute("ROLLBACK")
    assert cache.get(b"a") is None
    time.sleep(AGAIN_S)
    assert (cache.get(b"a"), cache.get(b"b")) == (b"1", None)
    cache.put(b"b", b"2")
    assert cache.get(b"b") == b"2"
    assert caplog.text.count("database is locked") == 1


def test_what_is_judged_elsewhere_stays_at_home_unless_the_user_says_otherwise(
    tmp_path: Path, judging: Judging, monkeypatch
) -> None:
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path))
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')

    def loaded(**settings: Any):
        config = TasksConfig(names=(str(path),), judge=JudgeConfig(url=judging.url, **settings))
        (spec,) = specs_of(config)
        return load_task(spec)

    first, other, shared = loaded(), loaded(model="m"), loaded(exchangeable=True)
    assert [is_exchangeable(task) for task in (first, other, shared)] == [False, False, True]
    assert first.version == shared.version != other.version
    judging.says((200, {}, {"scores": [0.5]}))
    assert first.score(next(iter(first.examples(0))), ["2"]) == [{"judge": 0.5}]
    of_script = as_task([("1+1=", "2")], [judging.url, "exact_match"])
    assert not is_exchangeable(of_script)
    assert of_script.score(next(iter(of_script.examples(0))), ["2"]) == [
        {"reward_0": 0.5, "exact_match": 1.0}
    ]


def test_a_url_is_the_name_of_a_reward() -> None:
    assert isinstance(load_reward("https://judge.example/score"), HttpJudge)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"url": "https://me:secret@judge.example"}, "no password in a URL"),
        ({"url": "ftp://judge.example"}, "must begin with http"),
        ({"read": "[0-9]+"}, "has no group"),
        ({"read": "("}, "not a regular expression"),
    ],
)
def test_settings_of_a_judge_that_cannot_be_are_refused(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        JudgeConfig(**settings)


def test_a_judge_gives_up_before_its_process_is_ended() -> None:
    with pytest.raises(ValidationError, match="must be below"):
        TasksConfig(judge=JudgeConfig(url="http://127.0.0.1:1", timeout_s=120.0))
