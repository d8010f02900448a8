"""What the server answers: bodies and server-sent events in the form of OpenAI's API."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..models import Tokenizer
from .branching import mean_logprob
from .echo import Echo, prompt_logprobs_body
from .errors import engine_error
from .logprob_bodies import ChatLogprobs, CompletionLogprobs
from .output_stream import EngineFailed, OutputStream
from .outputs import RequestOutput

# OpenAI knows no "cancelled", which vLLM calls "abort", and no "timeout".
_FINISH_REASONS = {
    None: None,
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "timeout": "timeout",
}


Body = dict[str, Any] | None
Reason = str | None


class CompletionFormat:
    """The bodies of /v1/completions."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"
    logprobs = CompletionLogprobs

    def choice(self, index: int, text: str, logprobs: Body, finish_reason: Reason) -> Body:
        """A whole choice."""
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": _FINISH_REASONS[finish_reason],
        }

    def opening(self, index: int) -> Body:
        """What a stream says first of a choice."""
        return None

    def delta(self, index: int, text: str, logprobs: Body, finish_reason: Reason) -> Body:
        """A piece of a choice in a stream."""
        return self.choice(index, text, logprobs, finish_reason)

    def add_prompt_logprobs(self, body: dict[str, Any], prompts: list[list[Body]]) -> None:
        """Put in what is known of each choice's prompt, as vLLM does."""
        for choice, entries in zip(body["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = entries


class ChatFormat:
    """The bodies of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    logprobs = ChatLogprobs

    def choice(self, index: int, text: str, logprobs: Body, finish_reason: Reason) -> Body:
        """A whole choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": _FINISH_REASONS[finish_reason],
        }

    def opening(self, index: int) -> Body:
        """What a stream says first of a choice: who speaks."""
        return self._piece(index, {"role": "assistant", "content": ""}, None, None)

    def delta(self, index: int, text: str, logprobs: Body, finish_reason: Reason) -> Body:
        """A piece of a choice in a stream."""
        return self._piece(index, {"content": text} if text else {}, logprobs, finish_reason)

    def _piece(self, index: int, delta: dict[str, str], logprobs: Body, reason: Reason) -> Body:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": _FINISH_REASONS[reason],
        }

    def add_prompt_logprobs(self, body: dict[str, Any], prompts: list[list[Body]]) -> None:
        """Put in what is known of the prompt, which all choices share, as vLLM does."""
        body["prompt_logprobs"] = prompts[0]


class Answer:
    """The answer to one API request, made of the outputs of its engine requests.

    Args:
        form: which of the two APIs is spoken.
        model: the name the client asked for.
        stream: the outputs; request `p * num_branches + b` is answer b to prompt p.
        tokenizer: shows the tokens that logprobs speak of.
        num_logprobs: likeliest tokens to show with each token; None shows no logprobs.
        echoes: the prompts, if each is to stand before its choices.
        only_echoes: whether what comes after them is left out.
        with_prompt_logprobs: whether to show how likely the prompts' tokens are.
        num_choices: choices shown per prompt.
        num_branches: answers made per prompt; the best are shown if these are more.
        include_usage: whether a stream ends with token counts.
    """

    def __init__(
        self,
        form: CompletionFormat | ChatFormat,
        *,
        model: str,
        stream: OutputStream,
        tokenizer: Tokenizer,
        num_logprobs: int | None,
        echoes: Sequence[Echo],
        only_echoes: bool,
        with_prompt_logprobs: bool,
        num_choices: int,
        num_branches: int,
        include_usage: bool,
    ) -> None:
        self._form = form
        self._stream = stream
        self._num_choices = num_choices
        self._num_branches = num_branches
        self._include_usage = include_usage
        self._only_echoes = only_echoes
        self._index = {request_id: i for i, request_id in enumerate(stream.request_ids)}
        self._last: list[RequestOutput | None] = [None] * len(stream.request_ids)
        self._tokenizer, self._with_prompt_logprobs = tokenizer, with_prompt_logprobs
        self._to_echo = {i: echoes[i // num_branches] for i in self._index.values() if echoes}
        self._logprobs = None
        if num_logprobs is not None:
            self._logprobs = [form.logprobs(tokenizer, num_logprobs) for _ in self._last]
        self._head = {
            "id": form.id_prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed. Raises EngineFailed."""
        parts: list[list[RequestOutput]] = [[] for _ in self._last]
        with contextlib.closing(self._stream):
            async for output in self._outputs():
                parts[self._note(output)].append(output)
        choices = []
        for i in self._chosen(parts):
            text, logprobs = self._shown(i, parts[i])
            reason = parts[i][-1].finish_reason
            choices.append(self._form.choice(len(choices), text, logprobs, reason))
        body = {**self._head, "object": self._form.whole, "choices": choices}
        if self._with_prompt_logprobs:
            found = [
                [output.prompt_logprobs for output in parts[i] if output.prompt_logprobs]
                for i in self._chosen(parts)
            ]
            shown = [prompt_logprobs_body(self._tokenizer, *entries) for entries in found]
            self._form.add_prompt_logprobs(body, shown)
        return body | {"usage": self._usage()}

    async def _outputs(self) -> AsyncIterator[RequestOutput]:
        async for output in self._stream:
            yield _of_prompt(output) if self._only_echoes else output

    def _chosen(self, parts: Sequence[Sequence[RequestOutput]]) -> list[int]:
        """The answers to show: all, or of each prompt's the best ones, the best first."""
        count = self._num_branches
        if count == self._num_choices:
            return list(range(len(parts)))

        def score(i: int) -> float:
            return mean_logprob(
                [token for output in parts[i] for token in output.token_ids],
                [entry for output in parts[i] for entry in output.logprobs or ()],
            )

        groups = [range(first, first + count) for first in range(0, len(parts), count)]
        best = [sorted(group, key=lambda i: -score(i))[: self._num_choices] for group in groups]
        return [i for group in best for i in group]

    def events(self) -> EventStream:
        """The answer as a stream of server-sent events."""
        return EventStream(self._events(), self._stream)

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for output in self._outputs():
                for choice in self._deltas(output):
                    yield self._event([choice])
        except EngineFailed as error:
            # The status line is long sent; without [DONE] nobody takes this for a whole answer.
            yield _event(engine_error(error).body())
            return
        if self._include_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _deltas(self, output: RequestOutput) -> list[Body]:
        index = self._index[output.request_id]
        is_first = self._last[index] is None
        self._note(output)
        opening = self._form.opening(index) if is_first else None
        deltas: list[Body] = [] if opening is None else [opening]
        text, logprobs = self._shown(index, [output])
        # Half a character, or what may yet become a stop string, is no text: nothing to say.
        if text or output.finished or logprobs is not None:
            deltas.append(self._form.delta(index, text, logprobs, output.finish_reason))
        return deltas

    def _shown(self, index: int, outputs: Sequence[RequestOutput]) -> tuple[str, Body]:
        """Text and logprobs of outputs of a choice, behind its prompt if that is to come first."""
        echo = self._to_echo.pop(index, None)
        text = "".join([output.text for output in outputs])
        if echo is not None:
            text = echo.text + text
        if self._logprobs is None:
            return text, None
        writer = self._logprobs[index]
        token_ids = [token for output in outputs for token in output.token_ids]
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        if echo is None:
            return text, writer.body(token_ids, logprobs)
        found = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs), None)
        prompt = found or (None,) * len(echo.token_ids)
        return text, writer.body([*echo.token_ids, *token_ids], [*prompt, *logprobs], echo.text)

    def _event(self, choices: list[Body], usage: dict[str, Any] | None = None) -> str:
        body = {**self._head, "object": self._form.chunk, "choices": choices}
        if self._include_usage:
            body["usage"] = usage
        return _event(body)

    def _note(self, output: RequestOutput) -> int:
        index = self._index[output.request_id]
        self._last[index] = output
        return index

    def _usage(self) -> dict[str, Any]:
        """Token counts; a prompt is counted once, however many answers were made.

        Of its answers the one that found least in the cache counts: the others found what that
        one computed.
        """
        lasts = [last for last in self._last if last is not None]
        n = self._num_branches
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


def _of_prompt(output: RequestOutput) -> RequestOutput:
    """What an output says of the prompt, as if no token had been asked for."""
    return replace(
        output,
        text="",
        token_ids=(),
        logprobs=None,
        num_generated_tokens=0,
        finish_reason="length" if output.finish_reason == "stop" else output.finish_reason,
    )


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
