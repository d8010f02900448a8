"""Problems for `gpu_suite.py` and `tune.py`, made on the device, and their float64 answers."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels import row_width


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sequences of one length over a cache of one layer of Llama-3.1-8B (or another).

    Attributes:
        queries: per sequence; 1 is decode.
        shared: leading tokens that all sequences have in common, block-aligned.
    """

    seqs: int
    context: int
    queries: int = 1
    shared: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        kind = f"{self.seqs} x {self.context:,}"
        if self.queries > 1:
            kind += f", {self.queries:,} queries"
        if self.shared:
            kind += f", {self.shared:,} shared"
        return f"{kind}, {self.heads}/{self.kv_heads} heads of {self.head_size}, {self.dtype}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in all contexts, shared ones counted for each sequence."""
        token = self.kv_heads * 2 * self.head_size * jnp.dtype(self.dtype).itemsize
        return self.seqs * self.context * token

    @property
    def flops(self) -> int:
        """Of the two products over the keys that are seen."""
        keys = sum(range(self.context - self.queries + 1, self.context + 1))
        return 4 * self.seqs * self.heads * self.head_size * keys


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Arrays of one call, on the device."""

    shape: Shape
    q: jax.Array
    kv_cache: jax.Array
    block_tables: jax.Array
    context_lens: jax.Array
    query_start: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def make(shape: Shape, *, platform: str = "gpu", seed: int = 0) -> Problem:
    """Random contexts in blocks that lie scattered over the pool, as they do after a while."""
    per_seq = -(-shape.context // shape.block_size)
    shared = shape.shared // shape.block_size
    own = per_seq - shared
    num_blocks = 1 + shared + shape.seqs * own
    ids = 1 + np.random.default_rng(seed).permutation(num_blocks - 1).astype(np.int32)
    tables = np.empty((shape.seqs, per_seq), np.int32)
    tables[:, :shared] = ids[:shared]
    tables[:, shared:] = ids[shared:].reshape(shape.seqs, own)

    keys = jax.random.split(jax.random.key(seed), 2)
    dtype = jnp.dtype(shape.dtype)
    cache_shape = (num_blocks, shape.kv_heads, shape.block_size, 2 * shape.head_size)
    q_dtype = dtype if dtype.itemsize > 1 else jnp.dtype("bfloat16")

    @jax.jit
    def cache() -> jax.Array:
        if dtype == jnp.int8:
            numbers = jax.random.randint(keys[0], cache_shape, -127, 128, jnp.int8)
        else:
            numbers = jax.random.normal(keys[0], cache_shape, jnp.bfloat16).astype(dtype)
        pad = row_width(shape.head_size, platform) - 2 * shape.head_size
        return jnp.pad(numbers, ((0, 0), (0, 0), (0, 0), (0, pad))).at[0].set(0)

    head = None
    if dtype.itemsize == 1:
        unit = 2 / 127 if dtype == jnp.int8 else 1.0
        head = unit * (1 + 0.1 * jnp.arange(shape.kv_heads, dtype=jnp.float32))
    total = shape.seqs * shape.queries
    return Problem(
        shape=shape,
        q=jax.random.normal(keys[1], (total, shape.heads, shape.head_size)).astype(q_dtype),
        kv_cache=cache(),
        block_tables=jnp.asarray(tables),
        context_lens=jnp.full(shape.seqs, shape.context, jnp.int32),
        query_start=jnp.arange(shape.seqs + 1, dtype=jnp.int32) * shape.queries,
        k_scale=head,
        v_scale=None if head is None else 0.7 * head,
    )


def contiguous(problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[S, L, K, H]`, as a kernel without paging would have them."""
    shape = problem.shape
    rows = jnp.swapaxes(problem.kv_cache[problem.block_tables], 2, 3)[..., : 2 * shape.head_size]
    rows = rows.reshape(shape.seqs, -1, shape.kv_heads, 2 * shape.head_size)[:, : shape.context]
    return rows[..., : shape.head_size], rows[..., shape.head_size :]


def worst_error(out: jax.Array, problem: Problem, *, rows: int = 4) -> float:
    """Largest difference to float64 NumPy over some (query, head) rows spread over the result."""
    shape = problem.shape
    rng = np.random.default_rng(1)
    worst = 0.0
    for token in rng.integers(0, shape.seqs * shape.queries, rows):
        seq, index = divmod(int(token), shape.queries)
        head = int(rng.integers(shape.heads))
        kv_head = head // (shape.heads // shape.kv_heads)
        seen = shape.context - shape.queries + index + 1
        blocks = problem.kv_cache[problem.block_tables[seq], kv_head, :, : 2 * shape.head_size]
        blocks = blocks.astype(jnp.float32)
        kv = np.asarray(blocks, np.float64).reshape(-1, 2 * shape.head_size)[:seen]
        k, v = kv[:, : shape.head_size], kv[:, shape.head_size :]
        if problem.k_scale is not None and problem.v_scale is not None:
            k, v = k * float(problem.k_scale[kv_head]), v * float(problem.v_scale[kv_head])
        query = np.asarray(problem.q[token, head].astype(jnp.float32), np.float64)
        logits = k @ query / np.sqrt(shape.head_size)
        weights = np.exp(logits - logits.max())
        want = weights @ v / weights.sum()
        got = np.asarray(out[token, head].astype(jnp.float32), np.float64)
        worst = max(worst, float(np.abs(got - want).max()))
    return worst
