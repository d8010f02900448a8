"""What the server answers: bodies and server-sent events in the form of OpenAI's API."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import engine_error
from .output_stream import EngineFailed, OutputStream
from .outputs import RequestOutput

# OpenAI knows no "cancelled"; vLLM calls it "abort".
_FINISH_REASONS = {None: None, "stop": "stop", "length": "length", "cancelled": "abort"}


class CompletionFormat:
    """The bodies of /v1/completions."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": _FINISH_REASONS[finish_reason],
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says first of a choice."""
        return None

    def delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A piece of a choice in a stream."""
        return self.choice(index, text, finish_reason)


class ChatFormat:
    """The bodies of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": _FINISH_REASONS[finish_reason],
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says first of a choice: who speaks."""
        return self._piece(index, {"role": "assistant", "content": ""}, None)

    def delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A piece of a choice in a stream."""
        return self._piece(index, {"content": text} if text else {}, finish_reason)

    def _piece(self, index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": _FINISH_REASONS[reason],
        }


class Answer:
    """The answer to one API request, made of the outputs of its engine requests.

    Args:
        form: which of the two APIs is spoken.
        model: the name the client asked for.
        stream: the outputs; request `p * num_choices + c` is choice c of prompt p.
        num_choices: choices per prompt.
        include_usage: whether a stream ends with token counts.
    """

    def __init__(
        self,
        form: CompletionFormat | ChatFormat,
        *,
        model: str,
        stream: OutputStream,
        num_choices: int,
        include_usage: bool,
    ) -> None:
        self._form = form
        self._stream = stream
        self._num_choices = num_choices
        self._include_usage = include_usage
        self._index = {request_id: i for i, request_id in enumerate(stream.request_ids)}
        self._last: list[RequestOutput | None] = [None] * len(stream.request_ids)
        self._head = {
            "id": form.id_prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed. Raises EngineFailed."""
        texts: list[list[str]] = [[] for _ in self._last]
        with contextlib.closing(self._stream):
            async for output in self._stream:
                texts[self._note(output)].append(output.text)
        choices = [
            self._form.choice(i, "".join(texts[i]), last.finish_reason)
            for i, last in enumerate(self._last)
            if last is not None
        ]
        body = {**self._head, "object": self._form.whole, "choices": choices}
        return body | {"usage": self._usage()}

    def events(self) -> EventStream:
        """The answer as a stream of server-sent events."""
        return EventStream(self._events(), self._stream)

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for output in self._stream:
                for choice in self._deltas(output):
                    yield self._event([choice])
        except EngineFailed as error:
            # The status line is long sent; without [DONE] nobody takes this for a whole answer.
            yield _event(engine_error(error).body())
            return
        if self._include_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _deltas(self, output: RequestOutput) -> list[dict[str, Any]]:
        index = self._index[output.request_id]
        is_first = self._last[index] is None
        self._note(output)
        opening = self._form.opening(index) if is_first else None
        deltas = [] if opening is None else [opening]
        # Half a character, or what may yet become a stop string, is no text: nothing to say.
        if output.text or output.finished:
            deltas.append(self._form.delta(index, output.text, output.finish_reason))
        return deltas

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        body = {**self._head, "object": self._form.chunk, "choices": choices}
        if self._include_usage:
            body["usage"] = usage
        return _event(body)

    def _note(self, output: RequestOutput) -> int:
        index = self._index[output.request_id]
        self._last[index] = output
        return index

    def _usage(self) -> dict[str, Any]:
        """Token counts; a prompt is counted once, however many choices it has.

        Of its choices the one that found least in the cache counts: the others found what that
        one computed.
        """
        lasts = [last for last in self._last if last is not None]
        n = self._num_choices
        prompts: list[Sequence[RequestOutput]] = [lasts[i : i + n] for i in range(0, len(lasts), n)]
        num_prompt = sum(choices[0].num_prompt_tokens for choices in prompts)
        num_cached = sum(min(last.num_cached_tokens for last in choices) for choices in prompts)
        num_generated = sum(last.num_generated_tokens for last in lasts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


class EventStream(StreamingResponse):
    """A stream of events that cancels its requests when the client is gone, however it goes."""

    def __init__(self, events: AsyncIterator[str], stream: OutputStream) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; the base class ends this by cancellation if the client goes."""
        with contextlib.closing(self._stream):
            await super().__call__(scope, receive, send)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
