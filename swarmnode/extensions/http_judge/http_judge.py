"""A judge behind a URL as a reward: a language model that is asked about each answer, or any scorer.

tasks.reward = "https://...", [tasks.judge], HttpJudge(...) of a task file
        -> [HttpJudge] -> judgement_cache.py, or HTTP -> one number per answer, None where it could not be had

Two forms. With a `model`, an OpenAI-compatible chat endpoint is asked about each answer, and the number is
read out of what it says. Without, the URL gets {"prompt", "completions", "columns"} of a group and gives
{"scores": [...]}, a number or null for each.

A busy or broken judge is asked again, a few times and within the time of the group. What refuses us (a wrong
key, an unknown model) is an error, and so is a group for which nobody listened at the URL. What comes back is
bounded and believed only where it has the form and the range that were asked for. The key comes from the
environment, goes into one header and nowhere else.
"""

import hashlib
import itertools
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

import msgspec

from swarmnode.errors import TaskError
from swarmnode.extensions.http_judge.judgement_cache import JudgementCache
from swarmnode.machine.storage import resolve_paths
from swarmnode.printable import printable
from swarmnode.settings.config import JudgeConfig
from swarmnode.tasks.deadlines.work_clock import clock_of_work
from swarmnode.tasks.judging.plain_rewards import final_answer

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 20
READ_BYTES = 1 << 16

TRIES = 5
"""Attempts at one request that finds the judge busy, broken or unclear."""
TRIES_TO_REACH = 7
"""Attempts at one that cannot be sent, some 20 seconds: a judge that is not there yet may be starting."""

MOST_KEPT = 100_000
"""Judgements kept on disk."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Seconds before the second attempt, and most seconds before any; each wait is twice the last one."""

ONE_REPLY_S = 60.0
"""Longest that one attempt may take."""

PASSING = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 that may pass in a moment."""

SPARE_S = 1.0
"""Seconds before a group's deadline at which unanswered requests are given up, so that answers with a score
keep it."""

MISSES_A_LINE = 100
"""Requests without a score that share one line of the log, the first one's."""

SHOWN_CHARS = 200

_PLACE = re.compile(r"\{(\w+)\}")

_KEY = re.compile("[!-~]+")
"""Characters that an HTTP header takes. http.client quotes in its error what it refuses."""


class _Reason(msgspec.Struct, frozen=True):
    content: str


class _Choice(msgspec.Struct, frozen=True):
    message: _Reason


class _ChatReply(msgspec.Struct, frozen=True):
    """The part of an OpenAI-compatible reply that is read."""

    choices: tuple[_Choice, ...]


class _ScoresReply(msgspec.Struct, frozen=True):
    scores: tuple[float | None, ...]


class Unanswered(Exception):
    """Raised when the judge gave no usable answer but may later. `wait_s`: the wait that it asked for."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class _Unreachable(Unanswered):
    """Raised when a request could not be sent."""


class _NoTime(Unanswered):
    """Raised when a request was not begun: it tells nothing of the judge."""


@dataclass(slots=True)
class HttpJudge:
    """A reward on TRL's contract. In a task file: `reward = HttpJudge(JudgeConfig(url="https://..."))`.

    >>> HttpJudge(JudgeConfig(url="https://judge.example/v1", model="m")).endpoint
    'https://judge.example/v1/chat/completions'
    """

    config: JudgeConfig
    cache: Path | None = None
    """Folder of kept judgements. None: the cache in this user's home."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _cache: JudgementCache = field(init=False)
    _opener: OpenerDirector = field(init=False)
    _misses: Iterator[int] = field(init=False, default_factory=itertools.count)

    def __post_init__(self) -> None:
        if not self.config.url:
            raise TaskError("the judge has no URL", hint="set tasks.judge.url")
        path = self.cache or resolve_paths().cache / "judgements.sqlite"
        self._cache = JudgementCache(path, MOST_KEPT)
        self._opener = build_opener(_NoRedirects)

    @property
    def exchangeable(self) -> bool:
        """True if the user promised that every node would get the same scores."""
        return self.config.exchangeable

    @property
    def identity(self) -> str:
        """Digest of everything that the scores depend on, which tells this judge from another."""
        config = self.config
        parts = (config.url, config.model, config.prompt, config.read, config.lowest, config.highest)
        return hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()

    @property
    def endpoint(self) -> str:
        """URL of the requests: with a model, the chat completions below `url` unless it names them
        already."""
        url = self.config.url
        if not self.config.model or urlsplit(url).path.endswith("/chat/completions"):
            return url
        parts = urlsplit(url)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/chat/completions"))

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        trainer_state: object = None,
        log_extra: object = None,
        log_metric: object = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Returns a number for each completion, None for one that the judge did not answer in time. Raises
        TaskError if the judge refuses us or cannot be reached."""
        deadline = self.clock() + min(self.config.timeout_s, clock_of_work().left_s - SPARE_S)
        rows = [{name: values[at] for name, values in columns.items()} for at in range(len(completions))]
        missed: list[Unanswered] = []
        if self.config.model:
            asked = [
                partial(self._one, _as_text(prompt), final_answer(said), row, deadline, missed)
                for prompt, said, row in zip(prompts, completions, rows, strict=True)
            ]
            with ThreadPoolExecutor(self.config.concurrency) as threads:
                scores = [future.result() for future in [threads.submit(ask) for ask in asked]]
        else:
            scores = self._group(prompts[0], completions, rows[0], deadline, missed) if completions else []
        tried = [one for one in missed if not isinstance(one, _NoTime)]
        if tried and set(scores) == {None} and all(isinstance(one, _Unreachable) for one in tried):
            raise TaskError(
                f"the judge at {self._shown_url} cannot be reached: {tried[-1]}",
                hint="start it, or correct tasks.judge.url",
            )
        return scores

    # ---- the two forms ----

    def _one(
        self, prompt: str, said: str, row: Mapping[str, Any], deadline: float, missed: list[Unanswered]
    ) -> float | None:
        words = {**{name: str(value) for name, value in row.items()}, "prompt": prompt, "completion": said}
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": filled_in(self.config.prompt, words)}],
            "temperature": 0,
            "max_tokens": self.config.max_tokens,
        }
        scores = self._asked(_encoded(body), self._read_chat, deadline, missed)
        return None if scores is None else scores[0]

    def _group(
        self,
        prompt: Any,
        completions: Sequence[Any],
        row: Mapping[str, Any],
        deadline: float,
        missed: list[Unanswered],
    ) -> list[float | None]:
        columns = {name: value for name, value in row.items() if _is_json(value)}
        body = {"prompt": prompt, "completions": list(completions), "columns": columns}
        count = len(completions)
        scores = self._asked(_encoded(body), partial(self._read_scores, count), deadline, missed)
        return [None] * count if scores is None else scores

    def _read_chat(self, reply: bytes) -> list[float | None]:
        try:
            said = msgspec.json.decode(reply, type=_ChatReply).choices[0].message.content
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as error:
            raise Unanswered(f"not a chat completion: {error}") from None
        found = [match[1] for match in re.finditer(self.config.read, said) if match[1] is not None]
        if not found:
            raise Unanswered(f"no number in: {self._shown(said)}")
        return [self._within(found[-1])]

    def _read_scores(self, count: int, reply: bytes) -> list[float | None]:
        try:
            scores = msgspec.json.decode(reply, type=_ScoresReply).scores
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Unanswered(f'no {{"scores": [...]}}: {error}') from None
        if len(scores) != count:
            raise Unanswered(f"{len(scores)} scores for {count} completions")
        return [None if score is None else self._within(score) for score in scores]

    def _within(self, number: str | float) -> float:
        try:
            value = float(number)
        except ValueError:
            raise Unanswered(f"no number: {self._shown(str(number))}") from None
        if not (math.isfinite(value) and self.config.lowest <= value <= self.config.highest):
            raise Unanswered(f"{value:g} is not within {self.config.lowest:g} and {self.config.highest:g}")
        return value

    # ---- asking ----

    def _asked(
        self,
        body: bytes,
        read: Callable[[bytes], list[float | None]],
        deadline: float,
        missed: list[Unanswered],
    ) -> list[float | None] | None:
        """Returns the judge's scores of this request, from the cache or by asking. None: it could not be
        had, and the reason is added to `missed`."""
        key = hashlib.blake2b(self.identity.encode() + body, digest_size=16).digest()
        if (kept := self._cache.get(key)) is not None:
            return msgspec.json.decode(kept, type=list[float | None])
        for attempt in range(max(TRIES, TRIES_TO_REACH)):
            try:
                scores = read(self._posted(body, deadline))
            except Unanswered as unanswered:
                if not self._wait(attempt, unanswered, deadline):
                    missed.append(unanswered)
                    break
            else:
                self._cache.put(key, msgspec.json.encode(scores))
                return scores
        return None

    def _wait(self, attempt: int, unanswered: Unanswered, deadline: float) -> bool:
        """Waits before the next attempt. Returns False if no time is left for one."""
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1.0)
        if unanswered.wait_s is not None:
            wait_s = max(wait_s, unanswered.wait_s)
        tries = TRIES_TO_REACH if isinstance(unanswered, _Unreachable) else TRIES
        if attempt + 1 < tries and self.clock() + wait_s < deadline:
            self.sleep(wait_s)
            return True
        if (missed := next(self._misses)) % MISSES_A_LINE == 0:
            so_far = f" (to {missed + 1} requests so far)" if missed else ""
            logger.warning("the judge at %s gave no score%s: %s", self._shown_url, so_far, unanswered)
        return False

    def _posted(self, body: bytes, deadline: float) -> bytes:
        left_s = min(ONE_REPLY_S, deadline - self.clock())
        if left_s <= 0:
            raise _NoTime("there is no time left")
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.config.key_env:
            headers["Authorization"] = f"Bearer {self._key()}"
        request = Request(self.endpoint, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=left_s) as reply:
                return self._whole(reply, self.clock() + left_s)
        except HTTPError as error:
            with error:
                raise self._refused(error) from None
        except URLError as error:
            raise _Unreachable(self._shown(str(error.reason))) from None
        except OSError as error:
            raise Unanswered(f"{type(error).__name__}: {self._shown(str(error))}") from None
        except (HTTPException, ValueError) as error:
            # They quote what was sent or received, in a spelling in which the key need not be found.
            raise Unanswered(type(error).__name__) from None

    def _whole(self, reply: Any, deadline: float) -> bytes:
        data = b""
        while part := reply.read1(READ_BYTES):
            data += part
            if len(data) > MAX_REPLY_BYTES:
                raise Unanswered(f"a reply of more than {MAX_REPLY_BYTES} bytes")
            if self.clock() > deadline:
                raise Unanswered("its reply did not end in time")
        return data

    def _refused(self, error: HTTPError) -> Exception:
        if error.code in PASSING or error.code >= 500:
            return Unanswered(f"status {error.code}", _seconds(error.headers))
        try:
            said = error.read(4 * SHOWN_CHARS).decode(errors="replace")
        except (OSError, HTTPException):
            said = ""
        return TaskError(
            f"the judge at {self._shown_url} refused it with status {error.code}: {self._shown(said)}",
            hint="see tasks.judge.url, .model and .key_env",
        )

    def _key(self) -> str:
        """Returns what the variable holds, without the line break of a file behind it. Raises TaskError."""
        name = self.config.key_env
        key = os.environ.get(name, "").strip()  # noqa: TID251  the user named the variable
        if not key:
            raise TaskError(
                f"{name}, which holds the key of the judge, is not set", hint=f"export {name}=..."
            )
        if not _KEY.fullmatch(key):
            raise TaskError(
                f"{name} does not hold a valid key: it has spaces, line breaks or non-ASCII characters",
                hint="put the key and nothing else there",
            )
        return key

    def _shown(self, text: str) -> str:
        """Returns a message of the other side or of the system fit for a log: short, and without the key."""
        if self.config.key_env:
            key = self._key()
            for spelt in (key, msgspec.json.encode(key)[1:-1].decode()):
                text = text.replace(spelt, "***")
        return printable(text)[:SHOWN_CHARS]

    @property
    def _shown_url(self) -> str:
        return urlunsplit(urlsplit(self.endpoint)._replace(query="", fragment=""))


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def filled_in(template: str, words: Mapping[str, str]) -> str:
    """Returns the template with its {names} replaced once: braces in an answer stay as they are. Raises
    TaskError for an unknown name.

    >>> filled_in("Is {completion} right?", {"completion": "{prompt}"})
    'Is {prompt} right?'
    """

    def word(match: re.Match[str]) -> str:
        if match[1] not in words:
            raise TaskError(
                f"tasks.judge.prompt names {{{match[1]}}}, which the example does not have",
                hint=f"available are {', '.join(sorted(words))}",
            )
        return words[match[1]]

    return _PLACE.sub(word, template)


def _as_text(prompt: Any) -> str:
    """Returns a prompt as text; messages stand one below the other."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def _encoded(body: object) -> bytes:
    return msgspec.json.encode(body, order="deterministic")


def _is_json(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def _seconds(headers: Any) -> float | None:
    """Returns the seconds of a Retry-After header, None if it is no number."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except (TypeError, ValueError):
        return None
    return seconds if 0 <= seconds < 3600 else None
