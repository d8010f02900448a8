"""The HTTP application: OpenAI's completions and chat, models, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ..models.chat import ChatTemplateError
from .async_engine import AsyncEngine
from .body_limit import BodyLimit
from .cache_api import install_cache_routes
from .chat_ids import chat_ids
from .echo import Echo
from .errors import ApiError, install_error_handlers, refusal
from .output_stream import EngineFailed
from .protocol import ChatRequest, CompletionRequest, GenerationRequest, Message
from .refusals import EngineDraining
from .responses import Answer, ChatFormat, CompletionFormat
from .sampling_params import InvalidRequest
from .served_models import ServedModels

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is at fault; `error.param` names the field."},
    "503": {"description": "The engine has stopped or stops; `error.message` says why."},
}


def create_app(
    async_engine: AsyncEngine,
    *,
    model_name: str | None = None,
    adapter_dir: Path | None = None,
    cache_control: bool = False,
) -> FastAPI:
    """The server's ASGI application around `async_engine`, which it closes when it shuts down.

    Args:
        async_engine: what answers.
        model_name: what clients call the model; by default its own name.
        adapter_dir: a folder; clients may load adapters that lie in it, and none without it.
        cache_control: serve cache control too, to everybody who can reach the server.
    """
    models = ServedModels(async_engine, model_name or async_engine.loaded.name, adapter_dir)
    server = _Server(async_engine, models)
    app = FastAPI(title="octavo", version=version("octavo"), lifespan=server.lifespan)
    app.add_middleware(BodyLimit)
    install_error_handlers(app)
    post: dict[str, Any] = {"methods": ["POST"], "responses": _ERRORS}
    app.add_api_route("/v1/completions", server.completions, **post)
    app.add_api_route("/v1/chat/completions", server.chat, **post)
    app.add_api_route("/v1/models", models.list, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", models.describe, methods=["GET"])
    if adapter_dir is not None:
        app.add_api_route("/v1/load_lora_adapter", models.load, **post)
        app.add_api_route("/v1/unload_lora_adapter", models.unload, **post)
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/metrics", server.metrics, methods=["GET"])
    if cache_control:
        install_cache_routes(app, async_engine, server.chat_ids, _ERRORS)
    return app


class _Server:
    def __init__(self, async_engine: AsyncEngine, models: ServedModels) -> None:
        self._engine = async_engine
        self._models = models

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self._engine.close)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        self._models.adapter_of(body.model)
        answer = self._answer(CompletionFormat(), body, body.prompt)
        return await _unless_gone(request, answer)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        self._models.adapter_of(body.model)
        return await _unless_gone(request, self._answer_chat(body))

    async def health(self) -> dict[str, str]:
        """200 while the engine takes requests, else 503 with the reason."""
        if (failure := self._engine.failure) is not None:
            raise failure
        if self._engine.draining:
            raise EngineDraining
        return {"status": "ok"}

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        if self._engine.metrics is None:
            raise ApiError(404, "this server collects no metrics", code="no_metrics")
        try:
            stats = await self._engine.stats()
        except EngineFailed:
            stats = None
        accept = request.headers.get("accept", "")
        page, content_type = self._engine.metrics.render(stats, accept)
        return Response(page, headers={"Content-Type": content_type})

    async def _answer_chat(self, body: ChatRequest) -> Response:
        return await self._answer(ChatFormat(), body, [await self.chat_ids(body.messages)])

    async def chat_ids(self, conversation: Sequence[Message]) -> list[int]:
        """A conversation as the model's template writes it."""
        loaded = self._engine.loaded
        if loaded.chat_template is None:
            message = "this model has no chat template; use /v1/completions"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        messages = [message.for_template() for message in conversation]
        try:
            return await asyncio.to_thread(chat_ids, loaded, messages)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="chat_template") from None

    async def _answer(
        self,
        form: CompletionFormat | ChatFormat,
        body: GenerationRequest,
        prompts: Sequence[str | list[int]],
    ) -> Response:
        try:
            params = body.params()
            stream = await self._engine.submit_all(
                [(prompt, params) for prompt in prompts],
                cache_salt=body.cache_salt or "",
                priority=body.priority or 0,
                adapter=self._models.adapter_of(body.model),
            )
        except InvalidRequest as error:
            raise refusal(error, body.field_of(error.param)) from None
        echoes = []
        if body.echoes_prompt:  # their tokens are known to be valid by now
            tokenizer = self._engine.loaded.tokenizer
            echoes = await asyncio.to_thread(lambda: [Echo.of(p, tokenizer) for p in prompts])
        answer = Answer(
            form,
            model=body.model,
            stream=stream,
            tokenizer=self._engine.loaded.tokenizer,
            num_logprobs=body.num_logprobs,
            echoes=echoes,
            only_echoes=body.only_echoes,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            num_choices=body.num_choices,
            num_branches=body.num_branches,
            include_usage=body.include_usage,
        )
        return answer.events() if body.stream else JSONResponse(await answer.whole())


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of `work`, which is cancelled if the client goes away first."""
    answering = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        return Response(status_code=499)  # nobody will read it
    finally:
        for task in (answering, watching):
            task.cancel()
        await asyncio.gather(answering, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
