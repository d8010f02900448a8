"""What `kernels_static.py` compiles: ops at the shapes of real models, and their floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from octavo import pallas_kernels as ops
from octavo.paged import shared_prefixes
from octavo.pallas_kernels import Chip, row_width

BF16, F32, INT8, FP8 = "bfloat16", "float32", "int8", "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class StaticCase:
    """One op at one shape.

    Attributes:
        op: "decode", "prefill", "cascade", "write_kv", "copy_blocks", "gather_blocks" or
            "scatter_blocks".
        seqs, context: sequences and tokens in each one's cache.
        tokens: queries in all (prefill), tokens written, or blocks moved.
        window, cap: options of attention.
        in_table: whether it has a row in the committed table; the others only have to compile.
    """

    op: str
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    seqs: int = 2
    context: int = 4096
    tokens: int = 0
    dtype: str = BF16
    window: int | None = None
    cap: float | None = None
    in_table: bool = False

    @property
    def name(self) -> str:
        shape = f"{self.op}-{self.heads}/{self.kv_heads}x{self.head_size}-b{self.block_size}"
        extras = [f"s{self.seqs}x{self.context}", self.dtype]
        extras += [f"t{self.tokens}"] if self.tokens else []
        extras += [f"w{self.window}"] if self.window else []
        extras += [f"cap{self.cap}"] if self.cap else []
        return "-".join([shape, *extras])

    @property
    def is_attention(self) -> bool:
        return self.op in ("decode", "prefill", "cascade")

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.block_size * 2 * self.head_size * jnp.dtype(self.dtype).itemsize

    @property
    def floor_bytes(self) -> int:
        """Bytes of keys and values that must be moved whatever the kernel."""
        if self.op == "write_kv":
            return self.tokens * self.block_bytes // self.block_size
        if self.op == "cascade":
            return self.block_bytes * (self.context // self.block_size)
        if self.is_attention:
            return self.seqs * self.block_bytes * -(-self.context // self.block_size)
        return 2 * self.tokens * self.block_bytes

    @property
    def floor_flops(self) -> int:
        """Operations of the two products over the keys that are seen, no more."""
        if not self.is_attention:
            return 0
        if self.op == "prefill":
            each = self.tokens // self.seqs
            keys = self.seqs * sum(range(self.context - each + 1, self.context + 1))
        else:
            keys = self.seqs * self.context
        return 4 * self.heads * self.head_size * keys

    def floor_seconds(self, chip: Chip) -> float:
        """The longer of both at the chip's peak rates."""
        return max(
            self.floor_bytes / chip.hbm_bytes_per_second,
            self.floor_flops / chip.bf16_flops_per_second,
        )

    def array_seconds(self, chip: Chip) -> float:
        """What the two products take at least on a TPU's array of matrix units.

        Each of its cycles yields a row of scores no wider than the array, whichever operand stays
        in it and however heads are packed, and sums no deeper than the head. The values can use
        all of it: streamed through resident weights, summed over keys.
        """
        depth = -(-self.head_size // chip.array_size) * chip.array_size
        scores = depth / self.head_size
        return self.floor_flops / chip.bf16_flops_per_second * (scores + 1) / 2

    def program(self, platform: str) -> tuple[Callable[..., Any], Sequence[Any], tuple[int, ...]]:
        """A function, the shapes of its arguments, and which of them it may overwrite."""
        implementation = f"mosaic_{platform}"
        table_len = -(-self.context // self.block_size)
        blocks = max(4096, self.seqs * table_len + 1)
        cache = _aval(
            (blocks, self.kv_heads, self.block_size, row_width(self.head_size, platform)),
            self.dtype,
        )
        q_dtype = F32 if self.dtype == F32 else BF16
        quantised = jnp.dtype(self.dtype).itemsize == 1
        scale = _aval((self.kv_heads,), F32)
        scales = {"k_scale": scale, "v_scale": scale} if quantised else {}
        if not self.is_attention:
            return self._movement(implementation, cache, scales)

        num_queries = self.tokens if self.op == "prefill" else self.seqs
        q = _aval((num_queries, self.heads, self.head_size), q_dtype)
        tables, lens = _index((self.seqs, table_len)), _index((self.seqs,))
        if self.op == "cascade":

            def cascade(q, cache, tables, lens, scales):
                prefixes = shared_prefixes(tables, lens, self.block_size)
                return ops.shared_prefix_attention(
                    q, cache, tables, lens, prefixes, implementation=implementation, **scales
                )

            return cascade, (q, cache, tables, lens, scales), ()

        def attend(q, cache, tables, lens, start, scales):
            return ops.paged_attention(
                q,
                cache,
                tables,
                lens,
                start,
                max_query_len=1 if self.op == "decode" else self.tokens,
                sliding_window=self.window,
                soft_cap=self.cap,
                implementation=implementation,
                **scales,
            )

        return attend, (q, cache, tables, lens, _index((self.seqs + 1,)), scales), ()

    def _movement(
        self, implementation: str, cache: jax.ShapeDtypeStruct, scales: dict[str, Any]
    ) -> tuple[Callable[..., Any], Sequence[Any], tuple[int, ...]]:
        ids = _index((self.tokens,))
        if self.op == "write_kv":
            new = _aval((self.tokens, self.kv_heads, self.head_size), BF16)

            def write(cache, k, v, slots, scales):
                return ops.write_kv(cache, k, v, slots, implementation=implementation, **scales)

            return write, (cache, new, new, ids, scales), (0,)
        op = getattr(ops, self.op)
        if self.op == "gather_blocks":
            return (lambda c, i: op(c, i, implementation=implementation)), (cache, ids), ()
        if self.op == "copy_blocks":
            args = (cache, ids, ids)
        else:
            args = (cache, ids, _aval((self.tokens, *cache.shape[1:]), self.dtype))
        return (lambda c, i, x: op(c, i, x, implementation=implementation)), args, (0,)


def _aval(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _index(shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    return _aval(shape, "int32")


def table_cases() -> Iterator[StaticCase]:
    """The rows of the committed table."""
    decode = StaticCase(op="decode", in_table=True)
    prefill = StaticCase(op="prefill", seqs=1, tokens=4096, context=4096, in_table=True)
    for case in (decode, prefill):
        yield case
        yield replace(case, heads=9, kv_heads=3, head_size=64)
        yield replace(case, dtype=INT8)
        yield replace(case, dtype=FP8)
    yield replace(decode, seqs=32, context=4096)
    yield replace(prefill, tokens=8192, context=8192)
    yield StaticCase(op="cascade", seqs=32, context=32768, in_table=True)
    yield StaticCase(op="write_kv", tokens=512, in_table=True)
    yield StaticCase(op="write_kv", tokens=512, dtype=INT8, in_table=True)
    yield StaticCase(op="write_kv", tokens=512, dtype=FP8, in_table=True)
    for op in ("copy_blocks", "gather_blocks", "scatter_blocks"):
        yield StaticCase(op=op, tokens=256, in_table=True)


def matrix_cases() -> Iterator[StaticCase]:
    """Shapes that need only compile: head sizes, KV heads, groups, block sizes, dtypes, options."""
    decode = StaticCase(op="decode")
    prefill = StaticCase(op="prefill", seqs=3, tokens=1024, context=2048)
    for case in (decode, prefill):
        for head_size in (64, 80, 96, 256):
            yield replace(case, head_size=head_size, heads=8, kv_heads=2)
        for kv_heads, groups in ((1, 16), (2, 7), (3, 3), (5, 4), (8, 1)):
            yield replace(case, kv_heads=kv_heads, heads=kv_heads * groups, head_size=64)
        for block_size in (8, 32, 64, 128, 256):
            yield replace(case, block_size=block_size)
        yield replace(case, dtype=F32)
        yield replace(case, window=1024, cap=30.0)
        for dtype in (INT8, FP8):
            yield replace(case, dtype=dtype, head_size=64, heads=9, kv_heads=3)
            yield replace(case, dtype=dtype, block_size=32)
    for op in ("write_kv", "copy_blocks", "gather_blocks", "scatter_blocks"):
        small = StaticCase(op=op, tokens=64, kv_heads=3, heads=9, head_size=64)
        yield small
        yield replace(small, dtype=F32, block_size=8)
        yield replace(small, dtype=INT8, block_size=64)
        yield replace(small, head_size=80, block_size=32)


def all_cases() -> list[StaticCase]:
    """Each by its own name; of two that are one, that of the table."""
    cases = {case.name: case for case in (*matrix_cases(), *table_cases())}
    in_table = {case.name: case for case in table_cases()}
    return list((in_table | cases).values())
