"""FLOPs and bytes of prefill and decoding, from a model's sizes.

All of it is host arithmetic on Python numbers or NumPy arrays (`float64` where sums may pass
`2**63`). Positions count tokens of one sequence: the cost from `start` to `stop` is that of the
tokens `start <= i < stop` when the ones before them are cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .shape import ModelShape

Count = TypeVar("Count", int, float, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is computed, and what passes between an accelerator and its own memory.

    Attention and the matrices are kept apart: they reach different shares of the peak, and one
    can be bound by memory while the other is not. Numbers, or arrays of one shape.

    Attributes:
        matmul_flops: of products with parameters.
        attention_flops: of queries with keys, and of weights with values.
        weight_bytes: parameters read.
        kv_bytes: keys and values read and written. Activations are not counted: they are less by
            a factor of the tokens in a chunk.
    """

    matmul_flops: Any
    attention_flops: Any
    weight_bytes: Any
    kv_bytes: Any

    @property
    def flops(self) -> Any:
        return self.matmul_flops + self.attention_flops

    @property
    def num_bytes(self) -> Any:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> Any:
        """Arithmetic intensity, FLOPs per byte."""
        return self.flops / self.num_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            matmul_flops=self.matmul_flops + other.matmul_flops,
            attention_flops=self.attention_flops + other.attention_flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
        )


def kv_bytes(shape: ModelShape, num_tokens: Count) -> Count:
    """Bytes of the keys and values of `num_tokens` tokens in all layers."""
    per_head = 2 * shape.head_size * shape.kv_dtype_bytes
    return shape.num_layers * shape.num_kv_heads * per_head * num_tokens


def attention_flops(shape: ModelShape, start: Count, stop: Count) -> Count:
    """FLOPs of attention for the queries from `start` to `stop`: `4 N H` per layer, query and key.

    The query at position i sees `i + 1/2` keys, the diagonal counting half, and no more than a
    window. So t tokens that end at length n cost `4 num_layers N H t (n - t/2)`, and a whole
    prompt `2 num_layers N H n²`. Query heads do the work: N, not K, in every layer.
    """
    per_pair = 2 * shape.num_layers * shape.num_heads * shape.head_size
    return per_pair * (_twice_seen(shape, stop) - _twice_seen(shape, start))


def _twice_seen(shape: ModelShape, stop: Count) -> Count:
    """Twice the pairs of a query and a key that it sees, over the queries before `stop`."""
    if shape.sliding_window is None:
        return stop * stop
    near = smaller(stop, shape.sliding_window)
    return near * (2 * stop - near)


def prefill_flops(shape: ModelShape, start: Count, stop: Count) -> Count:
    """FLOPs to compute the tokens from `start` to `stop` of a sequence, without the output head.

    Products with parameters cost 2 per parameter and token; see `attention_flops` for the rest.
    """
    return 2 * shape.num_params * (stop - start) + attention_flops(shape, start, stop)


def prefill_work(
    shape: ModelShape, start: Count, stop: Count, *, chunk_size: int | None = None
) -> Work:
    """The work of computing the tokens from `start` to `stop`, one sequence alone.

    Every chunk reads all parameters, and the keys and values up to its own end (of a window, no
    more than that and the chunk); None computes all in one chunk. Without the output head, so
    that the parts of a prompt add up: see `head_work`.
    """
    num_tokens = stop - start
    chunks, size = _chunks(num_tokens, chunk_size)
    # Chunk j of n sees `start + j * size` positions, the last one `stop`.
    seen = (chunks > 0) * (stop + (chunks - 1) * start + size * (chunks * (chunks - 1) // 2))
    if shape.sliding_window is not None:
        seen = smaller(seen, chunks * (shape.sliding_window + size))
    return Work(
        matmul_flops=2 * shape.num_params * num_tokens,
        attention_flops=attention_flops(shape, start, stop),
        weight_bytes=chunks * shape.num_params * shape.param_dtype_bytes,
        kv_bytes=kv_bytes(shape, seen + num_tokens),
    )


def head_work(shape: ModelShape, num_rows: int = 1) -> Work:
    """The work of the output head for `num_rows` tokens at once: what the first token adds."""
    return Work(
        matmul_flops=2 * shape.num_head_params * num_rows,
        attention_flops=0,
        weight_bytes=shape.num_head_params * shape.param_dtype_bytes,
        kv_bytes=0,
    )


def decode_work(
    shape: ModelShape, context_len: int, *, num_seqs: int = 1, shared_len: int = 0
) -> Work:
    """The work of one decode step of `num_seqs` sequences of `context_len` tokens each.

    Parameters are read once for all of them, and so are the keys and values of the first
    `shared_len` tokens, where attention over a shared prefix reads them so. FLOPs per byte of
    attention alone come to `G = N/K` in a two-byte cache: memory decides.

    Raises:
        ValueError: a sequence shares more than it has.
    """
    if not 0 <= shared_len <= context_len:
        raise ValueError(f"{shared_len=} must be from 0 to {context_len=}")
    per_pair = 4 * shape.num_layers * shape.num_heads * shape.head_size
    window = context_len if shape.sliding_window is None else shape.sliding_window
    seen = min(context_len, window)
    shared = max(shared_len - (context_len - seen), 0)
    read = shared + num_seqs * (seen - shared)
    layers = Work(
        matmul_flops=2 * shape.num_params * num_seqs,
        attention_flops=per_pair * num_seqs * seen,
        weight_bytes=shape.num_params * shape.param_dtype_bytes,
        kv_bytes=kv_bytes(shape, read + num_seqs),
    )
    return layers + head_work(shape, num_seqs)


def cost_slope(shape: ModelShape, block_size: int) -> float:
    """What a block of context adds to the FLOPs of computing a block, in a first block's FLOPs."""
    first = prefill_flops(shape, 0, block_size)
    return (prefill_flops(shape, block_size, 2 * block_size) - first) / first


def num_chunks(num_tokens: Count, chunk_size: int | None) -> Count:
    """Chunks that a prefill of `num_tokens` takes; None computes all in one."""
    return _chunks(num_tokens, chunk_size)[0]


def _chunks(num_tokens: Any, chunk_size: int | None) -> tuple[Any, Any]:
    """How many chunks, and how many tokens all but the last have."""
    if chunk_size is None:
        return (num_tokens > 0) * 1, num_tokens
    return -(-num_tokens // chunk_size), chunk_size


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or of each pair in arrays."""
    both_numbers = not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray)
    return min(a, b) if both_numbers else np.minimum(a, b)


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of each pair in arrays."""
    both_numbers = not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray)
    return max(a, b) if both_numbers else np.maximum(a, b)
