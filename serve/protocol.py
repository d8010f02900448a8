"""What a request may contain: OpenAI's completions and chat bodies, strictly read.

No value is converted ("5" is not 5, true is not 1) and no field is ignored. A field of OpenAI's
that this server does not implement is refused by name, unless its value asks for nothing: those
values are the tables `neutral` below. Ranges of sampling values are checked in one place,
`SamplingParams`; only what is about HTTP is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from .beam_search import BeamSearchParams
from .sampling_params import SamplingParams
from .strict_body import StrictBody, Text, check_text, fail, kind_of
from .structured_bodies import StructuredBody

MAX_CHOICES_PER_PROMPT = 128
MAX_CHOICES = 1024
MAX_STOP_STRINGS = 16
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat answers up to the context length


def _check_prompts(value: Any) -> Sequence[str | list[int]]:
    """Any of OpenAI's four forms, as a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise fail("expected a string, token ids, or a non-empty array of either")
    if all(type(token) is int for token in value):
        return [value]
    if all(isinstance(prompt, str) for prompt in value):
        prompts = [check_text(prompt) for prompt in value]
    elif all(isinstance(prompt, list) for prompt in value):
        if not all(type(token) is int for prompt in value for token in prompt):
            raise fail("token ids must be integers")
        prompts = value
    else:
        raise fail("expected only strings, only integers, or only arrays of integers")
    if not all(prompts):
        raise fail("a prompt is empty; the model needs at least one token")
    return prompts


def _check_content(value: Any) -> str:
    """A message's text; text parts are joined by line breaks, as vLLM does."""
    if not isinstance(value, list):
        return check_text(value)
    if not value:
        raise fail("expected a string or a non-empty array of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise fail(f"only parts of type 'text' are supported, not {kind!r:.40}")
        if extra := sorted(part.keys() - {"type", "text"}):
            raise fail(f"a text part has no field {extra[0]!r:.40}")
        texts.append(check_text(part.get("text")))
    return "\n".join(texts)


def _check_stop(value: Any) -> tuple[str, ...]:
    stop = [value] if isinstance(value, str) else value
    stop = [] if stop is None else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOP_STRINGS:
        raise fail(f"expected a string or an array of at most {MAX_STOP_STRINGS} strings")
    if not all(stop):
        raise fail("a stop string is empty")
    return tuple(check_text(text) for text in stop)


def _check_bias(value: Any) -> dict[int, Any] | None:
    """OpenAI's `logit_bias`: token ids, which JSON writes as strings, and numbers."""
    if value is not None and not isinstance(value, dict):
        raise fail(f"expected an object of token ids and numbers, not {kind_of(value)}")
    biases = {}
    for token, bias in (value or {}).items():
        if not token.isascii() or not token.isdecimal() or str(int(token[:20])) != token:
            raise fail(f"{token!r:.40} is not a token id")
        biases[int(token)] = bias
    return biases or None


def _check_salt(value: str) -> str:
    if not value:
        raise fail("the salt is empty; leave it out to share the cache with everybody")
    return value


Prompts = Annotated[
    Sequence[str | list[int]],
    PlainValidator(
        _check_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]
Content = Annotated[
    str, PlainValidator(_check_content, json_schema_input_type=str | list[dict[str, str]])
]
Stop = Annotated[
    tuple[str, ...], PlainValidator(_check_stop, json_schema_input_type=str | list[str] | None)
]
Bias = Annotated[
    dict[int, float] | None,
    PlainValidator(_check_bias, json_schema_input_type=dict[str, float] | None),
]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT)]
Salt = Annotated[Text, AfterValidator(_check_salt)]


class StreamOptions(StrictBody):
    """OpenAI's `stream_options`."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "include_obfuscation": (None, False),
        "continuous_usage_stats": (None, False),
    }

    include_usage: bool | None = None


# Fields of the bodies and of SamplingParams alike; null means the default.
_TAKEN_AS_GIVEN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "timeout_s",
)


# Fields that say how to sample, and `stream`: the answers of a search come all at once.
_NOT_IN_A_SEARCH = {"seed", "stop", "logprobs", "top_logprobs", "best_of", "stream", "priority"}
_NOT_IN_A_SEARCH |= {"prompt_logprobs", *StructuredBody.model_fields}
_NOT_IN_A_SEARCH |= set(_TAKEN_AS_GIVEN) - {"ignore_eos"}
_ONE_IS_NEUTRAL = {"temperature", "top_p", "repetition_penalty", "length_penalty"}


class GenerationRequest(StructuredBody):
    """The fields that completions and chat have in common."""

    model: Text
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: NumChoices | None = None
    stop: Stop = ()
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = Field(default=None, description="Accepted and not used.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias = None
    top_k: int | None = Field(default=None, description="An extension; 0 and -1 mean all tokens.")
    min_p: float | None = Field(default=None, description="An extension.")
    repetition_penalty: float | None = Field(
        default=None, description="An extension; 1 does nothing."
    )
    prompt_logprobs: int | None = Field(
        default=None, description="An extension; not for streams. The prompt is computed whole."
    )
    min_tokens: int | None = Field(default=None, description="An extension.")
    ignore_eos: bool | None = Field(default=None, description="An extension.")
    stop_token_ids: list[int] | None = Field(default=None, description="An extension.")
    priority: int | None = Field(
        default=None, description="An extension: lower values first, if the server is set so."
    )
    timeout_s: float | None = Field(
        default=None, description="An extension: seconds after which the text ends as it stands."
    )
    cache_salt: Salt | None = Field(
        default=None, description="An extension: only equal salts share cached prefixes."
    )
    use_beam_search: bool | None = Field(
        default=None, description="An extension: return the `n` best answers of a search `n` wide."
    )
    length_penalty: float | None = Field(
        default=None, description="An extension, for `use_beam_search`; above 0 favours long ones."
    )
    early_stopping: bool | str | None = Field(
        default=None, description="An extension, for `use_beam_search`, as in transformers."
    )

    @model_validator(mode="after")
    def _fits_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise fail("`stream_options` is only for `stream`: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise fail("`prompt_logprobs` is not for streams", param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _search_or_sample(self) -> GenerationRequest:
        asked = {name for name in self.model_fields_set if getattr(self, name) is not None}
        asked -= {name for name in asked if not getattr(self, name)}
        asked -= {name for name in asked & _ONE_IS_NEUTRAL if getattr(self, name) == 1}
        if not self.use_beam_search:
            if wrong := sorted(asked & {"length_penalty", "early_stopping"}):
                raise fail(f"`{wrong[0]}` is only for `use_beam_search`: true", param=wrong[0])
            return self
        if wrong := sorted(asked & _NOT_IN_A_SEARCH):
            raise fail(f"`{wrong[0]}` is not possible with `use_beam_search`", param=wrong[0])
        return self

    @property
    def num_branches(self) -> int:
        """How many answers are made per prompt."""
        return self.num_choices

    @property
    def num_choices(self) -> int:
        """How many answers are wanted per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each one; None for no report."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def echoes_prompt(self) -> bool:
        """Whether the prompt comes first in each answer."""
        return False

    @property
    def only_echoes(self) -> bool:
        """Whether nothing comes after it."""
        return False

    def _token_limit(self) -> int | None:
        raise NotImplementedError

    def params(self) -> SamplingParams | BeamSearchParams:
        """How to make all choices. Raises InvalidRequest, naming the field."""
        limit = self._token_limit()
        if self.use_beam_search:
            return BeamSearchParams(
                beam_width=self.num_choices,
                num_return_sequences=self.num_choices,
                max_tokens=DEFAULT_COMPLETION_TOKENS if limit is None else limit,
                length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
                early_stopping=self.early_stopping or False,  # pyright: ignore[reportArgumentType]
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
            )
        given = {
            name: value for name in _TAKEN_AS_GIVEN if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            max_tokens=limit,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            structured_outputs=self.form(),
            n=self.num_choices,
            best_of=self.num_branches,
            **given,
        )

    def field_of(self, param: str) -> str:
        """The field of this body that the engine's `param` came from."""
        fields = {"adapter": "model", "structured_outputs": self.form_field, "beam_width": "n"}
        return fields.get(param, param)


_NEUTRAL = {
    "skip_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
}


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    neutral = _NEUTRAL | {
        "suffix": (None, ""),
        "add_special_tokens": (None, True),
    }

    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None
    best_of: NumChoices | None = Field(
        default=None,
        description="So many answers are made; the `n` of the highest log probability per token "
        "are returned, the best first.",
    )

    @model_validator(mode="after")
    def _one_report_on_the_prompt(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            message = "`echo` with `logprobs` reports on the prompt; leave `prompt_logprobs` out"
            raise fail(message, param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _best_of_more(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.num_choices:
            raise fail(f"`best_of` must be at least `n`, {self.num_choices}", param="best_of")
        if self.stream and self.num_branches > self.num_choices:
            raise fail("the best are known at the end: `best_of` has no `stream`", param="best_of")
        return self

    @property
    def num_branches(self) -> int:
        """How many answers are made per prompt."""
        return self.best_of or self.num_choices

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if len(self.prompt) * self.num_branches > MAX_CHOICES:
            asked = f"{len(self.prompt)} prompts of {self.num_branches} choices each"
            raise fail(f"{asked} are more than {MAX_CHOICES} choices at once", param="prompt")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each one; None for no report."""
        return self.logprobs

    @property
    def echoes_prompt(self) -> bool:
        """Whether the prompt comes first in each answer."""
        return bool(self.echo)

    @property
    def only_echoes(self) -> bool:
        """Whether nothing comes after it: a text is scored by `echo`, `logprobs` and no tokens."""
        return self.echoes_prompt and self.max_tokens == 0 and not self.use_beam_search

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    def _token_limit(self) -> int | None:
        if self.only_echoes:
            return 1  # the least that an engine makes; it is not shown
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class Message(StrictBody):
    """One message of a chat; `developer` is read as `system`, and tools are not supported."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "name": (None,),
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "function_call": (None,),
        "tool_calls": (None, []),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    neutral = _NEUTRAL | {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None, "none"),
        "verbosity": (None,),
        "web_search_options": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "metadata": (None, {}),
        "prompt_cache_key": (None,),
        "safety_identifier": (None,),
        "add_generation_prompt": (None, True),
        "continue_final_message": (None, False),
        "chat_template_kwargs": (None, {}),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _top_logprobs_only_with_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise fail("`top_logprobs` is only for `logprobs`: true", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = "`max_tokens` and `max_completion_tokens` say different things; give one"
            raise fail(message, param="max_completion_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each one; None for no report."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def _token_limit(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        return self.max_completion_tokens

    def field_of(self, param: str) -> str:
        """The field of this body that the engine's `param` came from."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        renamed = {"prompt": "messages", "logprobs": "top_logprobs"}
        return renamed.get(param) or super().field_of(param)
