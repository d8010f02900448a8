"""The case table of `paged_attention`: poisoned caches, and what float64 NumPy makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels import row_width

FAR_AWAY = 10**6  # an id outside every pool: -1 would wrap, and be followed without a word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. `seqs` is (query_len, context_len) per sequence; (0, 0) is a row not in use.

    Attributes:
        padding: tokens behind the last sequence's.
        share: leading blocks that every sequence has in common with the first.
        repeat: every sequence's second block is its first one again.
        dtype, cache_dtype: of the queries and of the cache (None: the same).
    """

    seqs: tuple[tuple[int, int], ...]
    heads: int = 3
    kv_heads: int = 1
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    causal: bool = True
    padding: int = 0
    share: int = 0
    repeat: bool = False
    dtype: str = "float32"
    cache_dtype: str | None = None

    @property
    def tolerances(self) -> tuple[float, float]:
        """Largest and mean absolute error for N(0, 1) inputs."""
        if (self.cache_dtype or self.dtype) == "float32":
            return 2e-5, 2e-6
        return 2e-2, 3e-3


CASES = {
    "decode-boundaries": Case(seqs=((1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 257))),
    "decode-chunk-edges": Case(seqs=((1, 63), (1, 64), (1, 65), (1, 127), (1, 129), (1, 511))),
    "decode-long": Case(seqs=((1, 2050), (1, 3)), heads=9, kv_heads=3),
    "decode-many-tiles": Case(seqs=((1, 900), (1, 40))),
    "decode-thousands": Case(seqs=((1, 4097),), heads=4, kv_heads=1),
    "decode-unused-rows": Case(seqs=((0, 0), (1, 40), (0, 0), (1, 1)), padding=3),
    "decode-one-token": Case(seqs=((1, 1), (1, 2))),
    "all-empty": Case(seqs=((0, 0), (0, 0)), padding=4),
    "prefill-whole": Case(seqs=((33, 33),), heads=4, kv_heads=2),
    "prefill-over-tiles": Case(seqs=((300, 300), (129, 700)), heads=2, kv_heads=2),
    "prefill-chunk": Case(seqs=((17, 500), (16, 16), (2, 258)), heads=8, kv_heads=2, padding=5),
    "prefill-many-chunks": Case(seqs=((9, 900),), heads=2, kv_heads=1),
    "prefill-thousands": Case(seqs=((5, 3000),), heads=2, kv_heads=1),
    "mixed": Case(seqs=((1, 31), (40, 90), (0, 0), (1, 512), (5, 5)), heads=9, kv_heads=3),
    "shared-prefix": Case(seqs=((1, 100), (8, 104), (1, 97)), share=6),
    "repeated-blocks": Case(seqs=((1, 100), (8, 104)), repeat=True),
    "not-causal": Case(seqs=((7, 100), (40, 33), (1, 20), (0, 0)), causal=False, padding=2),
    "scale": Case(seqs=((1, 64), (30, 64)), scale=0.31),
    "g1-h80": Case(seqs=((1, 50), (20, 33)), heads=3, kv_heads=3, head_size=80),
    "g2-h96": Case(seqs=((1, 50), (20, 33)), heads=4, kv_heads=2, head_size=96),
    "g4-k5": Case(seqs=((1, 50), (20, 33)), heads=20, kv_heads=5),
    "g7-k1": Case(seqs=((1, 50), (20, 33)), heads=7, kv_heads=1),
    "g8-h128": Case(seqs=((1, 50), (20, 33)), heads=16, kv_heads=2, head_size=128),
    "g16-k1": Case(seqs=((1, 50), (20, 33)), heads=16, kv_heads=1),
    "g1-k8": Case(seqs=((1, 50), (20, 33)), heads=8, kv_heads=8),
    "h256": Case(seqs=((1, 50), (20, 33)), heads=2, kv_heads=1, head_size=256),
    "block-8": Case(seqs=((1, 50), (20, 33), (1, 8)), block_size=8),
    "block-32": Case(seqs=((1, 50), (20, 33), (1, 32)), block_size=32),
    "block-128": Case(seqs=((1, 300), (20, 257)), block_size=128),
    "block-256": Case(seqs=((1, 300), (20, 257)), block_size=256),
    "block-3": Case(seqs=((1, 300), (20, 257)), block_size=3),
    "window-below": Case(seqs=((1, 600), (40, 600), (1, 5)), window=37),
    "window-wide": Case(seqs=((40, 600), (1, 500)), window=300),
    "window-at": Case(seqs=((1, 64), (64, 64)), window=64),
    "window-above": Case(seqs=((1, 64), (30, 64)), window=1000),
    "window-one": Case(seqs=((1, 600), (40, 600)), window=1),
    "soft-cap": Case(seqs=((1, 64), (30, 64)), cap=2.0),
    "sinks": Case(seqs=((1, 64), (30, 64), (0, 0)), sinks=True, heads=6, kv_heads=2),
    "sinks-long": Case(seqs=((1, 1000), (3, 700)), sinks=True, heads=4, kv_heads=2),
    "bf16": Case(seqs=((1, 300), (30, 64)), dtype="bfloat16"),
    "int8": Case(
        seqs=((1, 300), (30, 64)), heads=4, kv_heads=2, dtype="bfloat16", cache_dtype="int8"
    ),
    "fp8": Case(
        seqs=((1, 300), (30, 64)),
        heads=4,
        kv_heads=2,
        dtype="bfloat16",
        cache_dtype="float8_e4m3fn",
    ),
    "int8-window-cap-sinks": Case(
        seqs=((1, 300), (30, 64)),
        heads=6,
        kv_heads=2,
        window=50,
        cap=3.0,
        sinks=True,
        dtype="bfloat16",
        cache_dtype="int8",
    ),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of `paged_attention`, and its result in float64."""

    args: tuple[jax.Array, ...]
    kwargs: dict[str, Any]
    out: np.ndarray
    lse: np.ndarray


def build(case: Case, *, platform: str = "cpu", swap_kv: bool = False) -> Problem:
    """The case's problem, its cache in the platform's layout, NaN in every block nobody owns."""
    rng = np.random.default_rng(7)
    size, groups, width = case.block_size, case.heads // case.kv_heads, 2 * case.head_size
    tables, num_blocks = _tables(case, rng)
    cache_dtype = jnp.dtype(case.cache_dtype or case.dtype)
    scales = _scales(cache_dtype, case.kv_heads, case.head_size)

    owned = {0} | {int(b) for row in tables for b in row if b != FAR_AWAY}
    values = rng.normal(size=(num_blocks, case.kv_heads, size, width)).astype(np.float32)
    values[0] = 0
    for s, (_, ctx) in enumerate(case.seqs):
        if ctx % size and not case.share and not case.repeat:
            values[tables[s, ctx // size], :, ctx % size :] = 0
    stored = _stored(values, scales, cache_dtype)
    # What the numbers in the cache stand for, exactly.
    exact = np.asarray(stored.astype(jnp.float32), np.float64) * scales
    unowned = np.array(sorted(set(range(num_blocks)) - owned))
    nan = np.nan if cache_dtype != jnp.int8 else 127
    stored = stored.at[unowned].set(jnp.asarray(nan, cache_dtype))
    pad = row_width(case.head_size, platform) - width
    stored = jnp.pad(stored, ((0, 0), (0, 0), (0, 0), (0, pad)))

    start = np.cumsum([0] + [n for n, _ in case.seqs]).astype(np.int32)
    total = int(start[-1]) + case.padding
    q = jnp.asarray(rng.normal(size=(total, case.heads, case.head_size)), case.dtype)
    # As large as the other denominators, so that a sink that is lost or counted twice shows.
    sinks = (4 + rng.normal(size=case.heads)).astype(np.float32) if case.sinks else None

    q64 = np.asarray(q.astype(jnp.float32), np.float64)
    scale = case.scale if case.scale is not None else case.head_size**-0.5
    out = np.zeros(q.shape, np.float64)
    lse = np.full(q.shape[:2], -np.inf)
    for s, (count, ctx) in enumerate(case.seqs):
        rows = exact[tables[s, : -(-ctx // size)]].transpose(1, 0, 2, 3)
        rows = rows.reshape(case.kv_heads, -1, width)[:, :ctx]
        k, v = rows[..., : case.head_size], rows[..., case.head_size :]
        if swap_kv:
            k, v = v, k
        for i in range(count):
            last = ctx - count + i if case.causal else ctx - 1
            low = 0 if case.window is None else max(0, last - case.window + 1)
            seen = slice(low, last + 1)
            for head in range(case.heads):
                logits = k[head // groups, seen] @ q64[start[s] + i, head] * scale
                if case.cap is not None:
                    logits = case.cap * np.tanh(logits / case.cap)
                every = logits if sinks is None else np.append(logits, sinks[head])
                peak = every.max()
                total_weight = np.exp(every - peak).sum()
                weights = np.exp(logits - peak) / total_weight
                out[start[s] + i, head] = weights @ v[head // groups, seen]
                lse[start[s] + i, head] = peak + np.log(total_weight)

    kwargs: dict[str, Any] = {
        "sliding_window": case.window,
        "soft_cap": case.cap,
        "scale": case.scale,
        "causal": case.causal,
    }
    if sinks is not None:
        kwargs["sinks"] = jnp.asarray(sinks)
    if cache_dtype.itemsize == 1:
        k_scale, v_scale = scales[0, :, 0, 0], scales[0, :, 0, -1]
        kwargs |= {"k_scale": jnp.asarray(k_scale), "v_scale": jnp.asarray(v_scale)}
    lens = np.array([ctx for _, ctx in case.seqs], np.int32)
    args = (q, stored, jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(start))
    return Problem(args, kwargs, out, lse)


def errors(out: jax.Array, lse: jax.Array, problem: Problem) -> tuple[float, float]:
    """Largest and mean absolute error of a result; infinite where lse = -inf disagrees."""
    got_out, got_lse = np.asarray(out.astype(jnp.float32), np.float64), np.asarray(lse, np.float64)
    empty = np.isneginf(problem.lse)
    if not np.array_equal(np.isneginf(got_lse), empty) or np.any(got_out[empty] != 0):
        return np.inf, np.inf
    differences = np.abs(got_out - problem.out)
    lse_difference = np.abs(got_lse[~empty] - problem.lse[~empty])
    worst = max(np.max(differences, initial=0), np.max(lse_difference, initial=0))
    return float(worst), float(np.mean(differences)) if differences.size else 0.0


def _tables(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Permuted block ids `[S, M]`, with entries past each context that must not be followed."""
    counts = [-(-ctx // case.block_size) for _, ctx in case.seqs]
    num_blocks = 1 + sum(counts) + 4
    ids = rng.permutation(np.arange(1, num_blocks))
    tables = np.full((len(counts), max(counts) + 2), FAR_AWAY, np.int32)
    taken = 0
    for s, count in enumerate(counts):
        tables[s, :count] = ids[taken : taken + count]
        taken += count
        if s and case.share:
            tables[s, : case.share] = tables[0, : case.share]
        if case.repeat and count > 1:
            tables[s, 1] = tables[s, 0]
    return tables, num_blocks


def _scales(dtype: jnp.dtype, kv_heads: int, head_size: int) -> np.ndarray:
    """Factors `[1, K, 1, 2H]`, different for every head and for keys and values."""
    if dtype.itemsize > 1:
        return np.ones((1, kv_heads, 1, 2 * head_size), np.float32)
    unit = 4 / 127 if dtype == jnp.int8 else 0.37
    head = 1 + 0.2 * np.arange(kv_heads, dtype=np.float32)
    per_head = np.stack([head, 1.3 * head], axis=-1)
    return (unit * np.repeat(per_head, head_size, axis=-1)).reshape(1, kv_heads, 1, -1)


def _stored(values: np.ndarray, scales: np.ndarray, dtype: jnp.dtype) -> jax.Array:
    if dtype.itemsize == 1:
        values = values / scales
    if dtype == jnp.int8:
        values = np.clip(np.round(values), -127, 127)
    return jnp.asarray(values).astype(dtype)
