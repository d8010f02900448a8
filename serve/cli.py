"""The command line: `octavo serve` and `octavo generate`; the others have files of their own."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
import uvicorn
from fastapi import FastAPI

from ..models.chat import ChatTemplateError
from ..models.loading import LoadedModel, load_model
from .adapter_cli import load_modules, parse_modules
from .api import create_app
from .async_engine import AsyncEngine
from .chat_ids import chat_ids
from .config import EngineConfig
from .console import (
    RUN_ERROR,
    USAGE_ERROR,
    ProgressFn,
    err,
    give_up,
    print_programs,
    progress_bar,
    quiet_interrupt,
)
from .draining_server import DrainingServer
from .engine import Engine
from .metrics import ServerMetrics
from .penalty_cli import penalty
from .pin_file import compute_and_pin, read_pins
from .replay_cli import replay
from .sampling_params import InvalidRequest, SamplingParams

_SECONDS_TO_END = 15  # what requests get, beyond the time to finish, to hear of the end

app = typer.Typer(
    name="octavo",
    help="Serve Llama-family models without ever computing the same prefix twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A known name (smollm2), a Hugging Face directory, or a GGUF file.",
    ),
]

Quantization = Annotated[
    Literal["int8", "w8a8"] | None,
    typer.Option(
        "--quantization",
        "-q",
        help="Keep weights in int8, a quarter of the bytes that decoding reads; w8a8 multiplies "
        "in int8 too.",
    ),
]


def main() -> None:
    """Entry point of the `octavo` command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # A service manager stops a server with SIGTERM: take it for Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` one option per field of `EngineConfig` in place of its `**options`."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(EngineConfig)
    derived = [
        inspect.Parameter(
            spec.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=spec.default,
            annotation=Annotated[
                hints[spec.name],
                typer.Option(help=spec.metadata["help"], rich_help_panel="Engine"),
            ],
        )
        for spec in dataclasses.fields(EngineConfig)
    ]
    parameters = [*own, *derived]
    command.__dict__["__signature__"] = signature.replace(parameters=parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {version('octavo')}")
        raise typer.Exit


@app.callback()
def octavo(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve Llama-family models without ever computing the same prefix twice."""


@app.command()
@engine_options
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default its own name.")
    ] = None,
    quantization: Quantization = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="A LoRA adapter (PEFT directory) to serve; repeat for more."
        ),
    ] = None,
    lora_dir: Annotated[
        Path | None,
        typer.Option(
            help="Let clients load adapters that lie in this folder.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that requests get to finish on SIGTERM.", min=0)
    ] = 10,
    cache_control: Annotated[
        bool,
        typer.Option(
            "--cache-control",
            help="Let clients explain, pin and reset the cache; they see what others have cached.",
        ),
    ] = False,
    pin_file: Annotated[
        Path | None,
        typer.Option(
            help="Compute these prompts and pin them before serving: an object a line, in the "
            "form of /cache/pin.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    explain_compile: Annotated[
        bool,
        typer.Option(
            "--explain-compile", help="List the programs that are compiled, and why; do not serve."
        ),
    ] = False,
    **options: Any,
) -> None:
    """Serve MODEL over HTTP in the form of OpenAI's API."""
    adapters = parse_modules(lora_modules or [])
    options["max_loras"] = max(options["max_loras"], len(adapters))
    config = _engine_config(options)
    pins = read_pins(pin_file) if pin_file else []
    if lora_dir is not None and not config.max_loras:
        give_up("--lora-dir needs slots for the adapters: give --max-loras", USAGE_ERROR)
    if explain_compile:
        with quiet_interrupt():
            with progress_bar() as progress:
                engine = _engine(model, quantization, config, progress)
            print_programs(engine.explain_compile())
        return
    # The port first: to find it taken after minutes of compilation would be late.
    with _bind(host, port) as listener:
        with quiet_interrupt(), progress_bar() as progress:
            engine = _engine(model, quantization, config, progress)
            name = served_model_name or engine.loaded.name
            load_modules(engine, adapters, name)
            engine.warmup(progress)
            if pin_file:
                compute_and_pin(engine, pin_file, pins, progress)
        with AsyncEngine(engine, metrics=ServerMetrics(name)) as async_engine:
            app = create_app(
                async_engine,
                model_name=name,
                adapter_dir=lora_dir,
                cache_control=cache_control,
            )
            _run_server(app, async_engine, listener, name, shutdown_timeout)


def _run_server(
    app: FastAPI,
    async_engine: AsyncEngine,
    listener: socket.socket,
    name: str,
    shutdown_timeout: float,
) -> None:
    server = DrainingServer(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_SECONDS_TO_END,
        ),
        async_engine=async_engine,
        shutdown_timeout=shutdown_timeout,
        announcement=f"serving {name} at {_url(listener)}/v1 (Ctrl-C stops it)",
    )
    try:
        server.run(sockets=[listener])
    except OSError as error:
        give_up(f"cannot listen on {_url(listener)}: {error.strerror or error}", RUN_ERROR)
    except KeyboardInterrupt:
        pass  # uvicorn repeats the signal after it has shut down


@app.command()
@engine_options
def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to continue or, with --chat, to answer.")
    ],
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put the prompt into the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least probability, as a part of the largest.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end of the text.")] = False,
    adapter: Annotated[
        str | None, typer.Option(metavar="PATH", help="A LoRA adapter (PEFT directory) to use.")
    ] = None,
    quantization: Quantization = None,
    **options: Any,
) -> None:
    """Continue PROMPT on stdout as the text comes; a line of figures follows on stderr."""
    if adapter is not None:
        options["max_loras"] = max(options["max_loras"], 1)
    config = _engine_config(options)
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
        )
    except InvalidRequest as error:
        give_up(f"--{error.param.replace('_', '-')}: {error}", USAGE_ERROR)
    with quiet_interrupt():
        with progress_bar() as progress:
            engine = _engine(model, quantization, config, progress)
            if adapter is not None:
                load_modules(engine, {adapter: adapter}, engine.loaded.name)
        _print_stream(engine, _prompt_ids(engine.loaded, prompt, chat=chat), params, adapter)


app.command()(penalty)
app.command()(replay)


def _prompt_ids(loaded: LoadedModel, prompt: str, *, chat: bool) -> Sequence[int]:
    if not chat:
        return loaded.tokenizer.encode(prompt)
    if loaded.chat_template is None:
        give_up(f"{loaded.name} has no chat template; use --raw", USAGE_ERROR)
    try:
        return chat_ids(loaded, [{"role": "user", "content": prompt}])
    except ChatTemplateError as error:
        give_up(str(error), RUN_ERROR)


def _print_stream(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, adapter: str | None
) -> None:
    num_programs, start = engine.num_programs, time.perf_counter()
    outputs = engine.stream(prompt, params, adapter=adapter)
    try:
        with progress_bar() as progress:
            progress(0, 0, "first token")
            last = next(outputs)
    except InvalidRequest as error:
        give_up(f"{error.param}: {error}", USAGE_ERROR)
    first = time.perf_counter()
    print(last.text, end="", flush=True)
    for last in outputs:
        print(last.text, end="", flush=True)
    print()
    seconds = time.perf_counter() - first
    rate = (last.num_generated_tokens - 1) / seconds if last.num_generated_tokens > 1 else 0.0
    compiled = engine.num_programs - num_programs
    err.print(
        f"{last.num_generated_tokens} tokens, "
        f"{last.num_cached_tokens} of {last.num_prompt_tokens} prompt tokens cached, "
        f"TTFT {first - start:.3f} s, {rate:.1f} tok/s"
        + (f" (compiling or loading {compiled} programs included)" if compiled else ""),
        soft_wrap=True,
    )


def _engine_config(options: dict[str, Any]) -> EngineConfig:
    try:
        return EngineConfig(**options)
    except ValueError as error:
        give_up(str(error), USAGE_ERROR)


def _engine(
    model: str, quantization: str | None, config: EngineConfig, progress: ProgressFn
) -> Engine:
    progress(0, 0, f"loading {model}")
    try:
        loaded = load_model(model, quantization=quantization, progress=progress)
    except (OSError, ValueError, ImportError) as error:
        give_up(f"cannot load {model!r}: {error}", RUN_ERROR)
    try:
        return Engine(loaded, config)
    except (OSError, ValueError, ImportError) as error:
        give_up(str(error), USAGE_ERROR)


def _bind(host: str, port: int) -> socket.socket:
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = error.strerror or error
        give_up(f"cannot listen on {host}:{port}: {reason}; choose another --port", RUN_ERROR)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
