"""Cache control over HTTP: explain, pin, unpin, reset.

For whoever runs the server, not for its users: an explanation tells what others have cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI
from pydantic import Field, model_validator

from ..paged import PinBudgetExceeded
from .async_engine import AsyncEngine
from .engine import Engine
from .errors import ApiError, refusal
from .protocol import Message, Prompts, Salt, StrictBody, Text, fail
from .sampling_params import InvalidRequest

T = TypeVar("T")


class CachedPrompt(StrictBody):
    """A prompt as the requests had it that computed it: text, token ids or messages."""

    prompt: Prompts | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    cache_salt: Salt | None = None
    adapter: Text | None = Field(default=None, description="A loaded adapter's name.")

    @model_validator(mode="after")
    def _one_prompt(self) -> CachedPrompt:
        if (self.prompt is None) == (self.messages is None) or len(self.prompt or "1") != 1:
            raise fail("give one prompt, as `prompt` or as `messages`", param="prompt")
        return self


class PinRequest(CachedPrompt):
    """Body of POST /cache/pin."""

    ttl_seconds: float | None = Field(default=None, description="For ever if it is left out.")


def install_cache_routes(
    app: FastAPI,
    async_engine: AsyncEngine,
    chat_ids_fn: Callable[[Sequence[Message]], Awaitable[list[int]]],
    responses: dict[int | str, dict[str, Any]],
) -> None:
    """Give `app` the routes of cache control; `chat_ids_fn` makes token ids of messages."""

    async def run(body: CachedPrompt, engine_fn: Callable[..., T]) -> T:
        (prompt,) = body.prompt or [await chat_ids_fn(body.messages or [])]
        whose = {"cache_salt": body.cache_salt or "", "adapter": body.adapter}
        try:
            return await async_engine.run(lambda engine: engine_fn(engine, prompt, **whose))
        except InvalidRequest as error:
            param = "messages" if error.param == "prompt" and body.messages else error.param
            raise refusal(error, param) from None
        except PinBudgetExceeded as error:
            raise ApiError(409, str(error), code="pin_budget_exceeded") from None

    @app.post("/cache/explain", responses=responses)
    async def explain(body: CachedPrompt) -> dict[str, Any]:
        """Why a prompt would hit the cache as far as it does, as data and as a sentence."""
        told = await run(body, Engine.explain)
        return dataclasses.asdict(told) | {"message": str(told)}

    @app.post("/cache/pin", responses=responses)
    async def pin(body: PinRequest) -> dict[str, int]:
        """Keep the cached blocks of a prompt; says how many tokens are in them."""
        pin_fn = partial(Engine.pin, ttl_seconds=body.ttl_seconds)
        return {"pinned_tokens": await run(body, pin_fn)}

    @app.post("/cache/unpin", responses=responses)
    async def unpin(body: CachedPrompt) -> dict[str, Any]:
        """End the pins of a prompt's blocks."""
        await run(body, Engine.unpin)
        return {}

    @app.post("/reset_prefix_cache", responses=responses)
    async def reset(
        keep_pinned: bool = False, disk: bool = False, remote: bool = False
    ) -> dict[str, int]:
        """Forget what is cached, on disk or remote too if asked; not blocks of running requests."""
        reset_fn = partial(Engine.reset_cache, keep_pinned=keep_pinned, disk=disk, remote=remote)
        return {"freed_blocks": await async_engine.run(reset_fn)}
