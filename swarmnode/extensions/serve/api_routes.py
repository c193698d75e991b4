"""OpenAI's endpoints.

api_guard.py -> [application] -> openai_requests.py -> answering_client.py -> openai_answers.py

GET /v1/models    POST /v1/chat/completions    POST /v1/completions    GET /healthz
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from swarmnode.extensions.serve import answering_client
from swarmnode.extensions.serve.openai_answers import AnswerForm, JsonObject, error_content
from swarmnode.extensions.serve.openai_requests import Asked, read_chat, read_completion
from swarmnode.extensions.serve.questions import AnswerBegan, Event, NoAnswer, QuestionRefused

MOST_BODY_BYTES = 1 << 20
MODEL_HEADER = "X-Swarmnode-Model"
"""Header with the version that writes an answer, as in the field `model`."""

LEFT = NoAnswer(499, "the client has disconnected", "client_left")

FindService = Callable[[], str | None]


class ApiRoutes:
    """The endpoints, over the service that `find` finds at each request: a node may stop and start again."""

    def __init__(self, find: FindService) -> None:
        self._find = find

    def routes(self) -> list[Route]:
        """Returns all routes."""
        return [
            Route("/healthz", _healthz),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
        ]

    async def _models(self, request: HttpRequest) -> Response:
        names = await answering_client.models(self._find())
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [_card(each) for each in names]})
        if name not in names:
            raise QuestionRefused(
                NoAnswer(404, f"the model {name!r} does not exist", "model_not_found", "model")
            )
        return JSONResponse(_card(name))

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._answered(request, read_chat)

    async def _completion(self, request: HttpRequest) -> Response:
        return await self._answered(request, read_completion)

    async def _answered(self, request: HttpRequest, read: Callable[[bytes], Asked]) -> Response:
        asked = read(await _content(request))
        caller = request.client.host if request.client is not None else ""
        question = msgspec.structs.replace(asked.question, caller=caller)
        events = answering_client.ask(self._find(), question)
        began = await anext(events)
        assert isinstance(began, AnswerBegan), "a question's first event"
        form = AnswerForm(asked, began)
        headers = {MODEL_HEADER: began.model}
        if asked.question.stream:
            stream = _server_sent(events, form)
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        return JSONResponse(await _unless_left(form.whole(events), events, request.receive), headers=headers)


def application(find: FindService) -> Starlette:
    """Returns the application that serves the endpoints."""
    return Starlette(
        routes=ApiRoutes(find).routes(),
        exception_handlers={404: _no_such_path, 405: _no_such_path, QuestionRefused: _refused},
    )


def refused_response(refused: NoAnswer) -> Response:
    """Returns an error in the form that OpenAI's clients expect."""
    again = {} if refused.retry_after_s is None else {"Retry-After": str(refused.retry_after_s)}
    return JSONResponse(error_content(refused), refused.status, again)


async def _content(request: HttpRequest) -> bytes:
    content = bytearray()
    try:
        async for piece in request.stream():
            content += piece
            if len(content) > MOST_BODY_BYTES:
                raise QuestionRefused(
                    NoAnswer(413, f"a request may have at most {MOST_BODY_BYTES} bytes", "too_large")
                )
    except ClientDisconnect:
        raise QuestionRefused(LEFT) from None
    return bytes(content)


async def _server_sent(events: AsyncGenerator[Event], form: AnswerForm) -> AsyncIterator[bytes]:
    async with aclosing(events):
        try:
            async for chunk in form.chunks(events):
                yield _event(chunk)
        except QuestionRefused as refusal:
            yield _event(error_content(refusal.refused))
            return
    yield b"data: [DONE]\n\n"


def _event(content: JsonObject) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _unless_left(
    answer: Awaitable[JsonObject], events: AsyncGenerator[Event], receive: Receive
) -> JsonObject:
    """Returns an answer, or gives it up if the client has left. Raises QuestionRefused, but outside the task
    group: an exception that leaves a group keeps the whole question in memory until garbage is collected."""
    async with aclosing(events), asyncio.TaskGroup() as tasks:
        writing, leaving = tasks.create_task(_kept(answer)), tasks.create_task(_left(receive))
        await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
        writing.cancel()
        leaving.cancel()
    if writing.cancelled():
        raise QuestionRefused(LEFT)
    found = writing.result()
    if isinstance(found, NoAnswer):
        raise QuestionRefused(found)
    return found


async def _kept(answer: Awaitable[JsonObject]) -> JsonObject | NoAnswer:
    try:
        return await answer
    except QuestionRefused as refusal:
        return refusal.refused


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _card(name: str) -> JsonObject:
    return {"id": name, "object": "model", "created": 0, "owned_by": "swarmnode"}


async def _healthz(request: HttpRequest) -> Response:
    return PlainTextResponse("ok\n")


async def _no_such_path(request: HttpRequest, error: Exception) -> Response:
    there = "try GET /v1/models, POST /v1/chat/completions, POST /v1/completions"
    return refused_response(
        NoAnswer(404, f"there is no {request.method} {request.url.path}: {there}", "not_found")
    )


async def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, QuestionRefused)
    return refused_response(error.refused)
