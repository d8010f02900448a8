"""From named tensors in a file to the parameters of a `Llama`.

A `TensorSource` names its tensors as Hugging Face checkpoints do. The model fuses some of them
(q, k and v; gate and up), so each parameter lists the tensors that it is made of and, for each,
the view of the parameter that the tensor fills. Names and shapes are checked for all of them
first; only then is memory taken, one parameter at a time.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from .config import LlamaConfig
from .llama import Llama
from .quantized import QuantizedWeight, check_quantization, quantize_parameter

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what) while something long goes on."""

_MAX_LISTED = 8
# Parameters in the making at once: enough to keep a few cores busy, while the host memory beyond
# the model itself stays at a few parameters.
_NUM_THREADS = 4


class WeightsError(ValueError):
    """Files that do not hold the model they should: broken, hostile, or of another shape."""


class TensorSource(Protocol):
    """Named tensors in files: what `build_model` needs to know of a checkpoint format."""

    @property
    def name(self) -> str:
        """What to call the source in messages: its path."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, by Hugging Face name."""
        ...

    @property
    def dtypes(self) -> Mapping[str, np.dtype]:
        """Dtype in which `read` returns each tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor; possibly a read-only view of the file."""
        ...


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only.

    Raises:
        WeightsError: the path is no regular file, cannot be opened or is empty.
    """
    if not path.is_file():
        raise WeightsError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise WeightsError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One tensor of a checkpoint and the place that it takes in a parameter."""

    name: str
    shape: tuple[int, ...]
    # The view of the parameter that the tensor fills; it has as many elements, in the same order.
    view: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    parts: tuple[_Part, ...]


def _whole(path: tuple[str | int, ...], name: str, *shape: int) -> _Parameter:
    part = _Part(name=name, shape=shape, view=lambda p: p)
    return _Parameter(path=path, shape=shape, parts=(part,))


def _layer_parameters(config: LlamaConfig, index: int) -> Iterator[_Parameter]:
    n, k, g, h = config.num_heads, config.num_kv_heads, config.num_groups, config.head_size
    d, f = config.hidden_size, config.intermediate_size

    def here(name: str) -> tuple[str | int, ...]:
        return ("layers", index, name)

    prefix = f"model.layers.{index}."
    attn, mlp = prefix + "self_attn.", prefix + "mlp."

    def part(name: str, *shape: int, view: Callable[[np.ndarray], np.ndarray]) -> _Part:
        return _Part(name=name, shape=shape, view=view)

    yield _whole(here("attn_norm"), prefix + "input_layernorm.weight", d)
    yield _Parameter(
        path=here("qkv"),
        shape=(d, k, g + 2, h),
        parts=(
            part(
                attn + "q_proj.weight", n * h, d, view=lambda p: p[:, :, :g].transpose(1, 2, 3, 0)
            ),
            part(attn + "k_proj.weight", k * h, d, view=lambda p: p[:, :, g].transpose(1, 2, 0)),
            part(
                attn + "v_proj.weight", k * h, d, view=lambda p: p[:, :, g + 1].transpose(1, 2, 0)
            ),
        ),
    )
    if config.attention_bias:
        yield _Parameter(
            path=here("qkv_bias"),
            shape=(k, g + 2, h),
            parts=(
                part(attn + "q_proj.bias", n * h, view=lambda p: p[:, :g]),
                part(attn + "k_proj.bias", k * h, view=lambda p: p[:, g]),
                part(attn + "v_proj.bias", k * h, view=lambda p: p[:, g + 1]),
            ),
        )
    if config.qk_norm:
        yield _whole(here("q_norm"), attn + "q_norm.weight", h)
        yield _whole(here("k_norm"), attn + "k_norm.weight", h)
    out = part(attn + "o_proj.weight", d, n * h, view=lambda p: p.transpose(3, 0, 1, 2))
    yield _Parameter(path=here("out"), shape=(k, g, h, d), parts=(out,))
    if config.attention_out_bias:
        yield _whole(here("out_bias"), attn + "o_proj.bias", d)
    yield _whole(here("mlp_norm"), prefix + "post_attention_layernorm.weight", d)
    yield _Parameter(
        path=here("gate_up"),
        shape=(d, 2, f),
        parts=(
            part(mlp + "gate_proj.weight", f, d, view=lambda p: p[:, 0].T),
            part(mlp + "up_proj.weight", f, d, view=lambda p: p[:, 1].T),
        ),
    )
    if config.mlp_bias:
        yield _Parameter(
            path=here("gate_up_bias"),
            shape=(2, f),
            parts=(
                part(mlp + "gate_proj.bias", f, view=lambda p: p[0]),
                part(mlp + "up_proj.bias", f, view=lambda p: p[1]),
            ),
        )
    down = part(mlp + "down_proj.weight", d, f, view=lambda p: p.T)
    yield _Parameter(path=here("down"), shape=(f, d), parts=(down,))
    if config.mlp_bias:
        yield _whole(here("down_bias"), mlp + "down_proj.bias", d)


def _parameters(config: LlamaConfig) -> Iterator[_Parameter]:
    v, d = config.vocab_size, config.hidden_size
    yield _whole(("embed",), "model.embed_tokens.weight", v, d)
    for index in range(config.num_layers):
        yield from _layer_parameters(config, index)
    yield _whole(("norm",), "model.norm.weight", d)
    if not config.tie_embeddings:
        yield _whole(("head",), "lm_head.weight", v, d)


def _ignorable(name: str, config: LlamaConfig) -> bool:
    # Old checkpoints store the rotary frequencies, which follow from the config; tied ones may
    # store the embedding a second time.
    return name.endswith("rotary_emb.inv_freq") or (
        config.tie_embeddings and name == "lm_head.weight"
    )


def listing(title: str, items: Iterable[str]) -> list[str]:
    """A line with the number of items and the first of them, or no line if there is none."""
    items = list(items)
    if not items:
        return []
    shown = items[:_MAX_LISTED]
    if len(items) > _MAX_LISTED:
        shown.append(f"and {len(items) - _MAX_LISTED} more")
    return [f"{title} ({len(items)}): " + "; ".join(shown)]


def _check(config: LlamaConfig, source: TensorSource) -> list[_Parameter]:
    if config.num_layers > len(source.shapes):
        # Checked before anything is made per layer: the number comes from an untrusted file.
        raise WeightsError(
            f"{source.name}: the config asks for {config.num_layers} layers, but there are only "
            f"{len(source.shapes)} tensors"
        )
    parameters = list(_parameters(config))
    expected = {part.name: part.shape for p in parameters for part in p.parts}
    found = source.shapes
    problems = [
        *listing("missing tensors", (f"{n} {s}" for n, s in expected.items() if n not in found)),
        *listing(
            "unexpected tensors",
            (
                f"{n} {tuple(s)}"
                for n, s in found.items()
                if n not in expected and not _ignorable(n, config)
            ),
        ),
        *listing(
            "wrong shapes",
            (
                f"{n} is {tuple(found[n])}, expected {s}"
                for n, s in expected.items()
                if n in found and tuple(found[n]) != s
            ),
        ),
        *listing(
            "not floating point",
            (
                f"{n} is {source.dtypes[n]}"
                for n in expected
                if n in found and not jnp.issubdtype(source.dtypes[n], jnp.floating)
            ),
        ),
    ]
    if problems:
        raise WeightsError(
            f"{source.name}: the tensors do not fit the config\n  " + "\n  ".join(problems)
        )
    return parameters


def _fill(parameter: _Parameter, source: TensorSource, dtype: np.dtype) -> jax.Array:
    # A fresh array, also where a view of the file would do: the model must not change or fault
    # when somebody rewrites the file.
    target = np.empty(parameter.shape, dtype)
    for part in parameter.parts:
        view = part.view(target)
        view[...] = source.read(part.name).reshape(view.shape)
    return jnp.asarray(target)


def _abstract_model(config: LlamaConfig, dtype: DTypeLike) -> Llama:
    """The model with shapes for arrays."""

    def one_layer() -> Llama:
        return Llama(replace(config, num_layers=1), dtype=dtype, rngs=nnx.Rngs(0))

    # All layers are alike, and tracing the making of one takes a while.
    model = nnx.eval_shape(one_layer)
    model.config = model.layers[0].config = config
    graphdef, state = nnx.split(model.layers[0])
    model.layers = nnx.List(
        [nnx.merge(graphdef, state, copy=True) for _ in range(config.num_layers)]
    )
    return model


def build_model(
    config: LlamaConfig,
    source: TensorSource,
    *,
    dtype: DTypeLike = jnp.float32,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> Llama:
    """Make the model that `config` describes from the tensors in `source`, cast to `dtype`.

    Where asked to, it is quantised, parameter by parameter as they are read.

    Raises:
        WeightsError: names, shapes or dtypes do not fit; the message lists every mismatch.
        ValueError: `dtype` is not a floating-point type, or there is no such quantisation.
    """
    check_quantization(quantization)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype={jnp.dtype(dtype)} must be a floating-point type")
    parameters = _check(config, source)
    graphdef, state = nnx.split(_abstract_model(config, dtype))
    flat = dict(nnx.to_flat_state(state))
    if {p.path: p.shape for p in parameters} != {path: v.shape for path, v in flat.items()}:
        raise AssertionError("the parameters of Llama and those of models/weights.py differ")
    np_dtype = np.dtype(jnp.dtype(dtype))

    def make(parameter: _Parameter) -> jax.Array | QuantizedWeight:
        array = _fill(parameter, source, np_dtype)
        if quantization is None:
            return array
        name = str(parameter.path[-1])
        return jax.block_until_ready(quantize_parameter(name, array, config, quantization))

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        arrays = pool.map(make, parameters)
        for done, (parameter, array) in enumerate(zip(parameters, arrays, strict=True), start=1):
            flat[parameter.path] = flat[parameter.path].replace(array)
            if progress is not None:
                progress(done, len(parameters), "weights")
    return nnx.merge(graphdef, nnx.from_flat_state(flat))
