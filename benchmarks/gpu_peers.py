"""What else computes attention on this GPU, for `gpu_suite.py`: each peer if it can be imported."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gpu_problems
import jax
import jax.numpy as jnp

# How to start a peer's work, and how to wait for what that returned.
Peer = tuple[Callable[[], Any], Callable[[Any], Any]]


class Absent(RuntimeError):
    """The peer is not installed here, or cannot do this problem."""


def jax_paged_attention(problem: gpu_problems.Problem, *, interpret: bool = False) -> Peer:
    """JAX's own Pallas (Triton) paged attention, decode only, at its best of a few settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    shape = problem.shape
    if shape.queries != 1 or jnp.dtype(shape.dtype).itemsize == 1:
        raise Absent("decode of a float cache only")
    pages = jnp.moveaxis(problem.kv_cache, 1, 0)  # [K, P, B, 2H]
    k, v = pages[..., : shape.head_size], pages[..., shape.head_size :]
    k, v = jnp.array(k), jnp.array(v)
    scale = jnp.asarray(shape.head_size**-0.5, problem.q.dtype)
    splits = next(s for s in (16, 8, 4, 2, 1) if problem.block_tables.shape[1] % s == 0)
    per_split = problem.block_tables.shape[1] // splits
    per_block = next(p for p in (8, 4, 2, 1) if per_split % p == 0)

    @jax.jit
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return module.paged_attention(
            q * scale,
            k,
            v,
            problem.block_tables,
            problem.context_lens,
            k_splits=splits,
            pages_per_compute_block=per_block,
            interpret=jax.default_backend() == "cpu",
        )

    return lambda: attend(problem.q, k, v), jax.block_until_ready


def jax_cudnn(problem: gpu_problems.Problem) -> Peer:
    """`jax.nn.dot_product_attention` through cuDNN on contiguous keys and values."""
    shape = problem.shape
    if jnp.dtype(shape.dtype).itemsize == 1:
        raise Absent("float keys and values only")
    if 1 < shape.queries < shape.context:
        raise Absent("its causal mask starts at the first key")
    k, v = gpu_problems.contiguous(problem)
    q = problem.q.reshape(shape.seqs, shape.queries, shape.heads, shape.head_size)
    causal = shape.queries > 1

    @jax.jit
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    return lambda: attend(q, k, v), jax.block_until_ready


def torch_sdpa(problem: gpu_problems.Problem) -> Peer:
    """PyTorch's scaled_dot_product_attention on contiguous keys and values."""
    torch, device = _torch()
    shape = problem.shape
    if jnp.dtype(shape.dtype).itemsize == 1:
        raise Absent("float keys and values only")
    if 1 < shape.queries < shape.context:
        raise Absent("its causal mask starts at the first key")

    def random(heads: int, tokens: int) -> Any:
        size = (shape.seqs, heads, tokens, shape.head_size)
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    q, k, v = (
        random(shape.heads, shape.queries),
        *(random(shape.kv_heads, shape.context) for _ in range(2)),
    )
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> Any:
        return attend(q, k, v, is_causal=shape.queries > 1, enable_gqa=True)

    return run, _synchronise(torch)


def flashinfer(problem: gpu_problems.Problem) -> Peer:
    """FlashInfer's paged decode or prefill on the same block tables (HND layout)."""
    torch, device = _torch()
    library = _import("flashinfer")
    shape = problem.shape
    if jnp.dtype(shape.dtype).itemsize == 1:
        raise Absent("measured on float caches only")
    per_seq = problem.block_tables.shape[1]
    pages = torch.randn(
        (problem.kv_cache.shape[0], 2, shape.kv_heads, shape.block_size, shape.head_size),
        device=device,
        dtype=torch.bfloat16,
    )
    total = shape.seqs * shape.queries
    q = torch.randn((total, shape.heads, shape.head_size), device=device, dtype=torch.bfloat16)
    integers = {"device": device, "dtype": torch.int32}
    indptr = torch.arange(shape.seqs + 1, **integers) * per_seq
    indices = torch.tensor(problem.block_tables.reshape(-1).tolist(), **integers)
    last = (shape.context - 1) % shape.block_size + 1
    last_len = torch.full((shape.seqs,), last, **integers)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    sizes = (shape.heads, shape.kv_heads, shape.head_size, shape.block_size)
    if shape.queries == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(indptr, indices, last_len, *sizes, q_data_type=torch.bfloat16)
    else:
        starts = torch.arange(shape.seqs + 1, **integers) * shape.queries
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            starts, indptr, indices, last_len, *sizes, causal=True, q_data_type=torch.bfloat16
        )
    return lambda: wrapper.run(q, pages), _synchronise(torch)


def vllm_paged(problem: gpu_problems.Problem) -> Peer:
    """vLLM's FlashAttention on the same block tables."""
    torch, device = _torch()
    attend = _import("vllm.vllm_flash_attn").flash_attn_varlen_func
    shape = problem.shape
    if jnp.dtype(shape.dtype).itemsize == 1:
        raise Absent("measured on float caches only")

    def random(*size: int) -> Any:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    pool = (problem.kv_cache.shape[0], shape.block_size, shape.kv_heads, shape.head_size)
    k, v = random(*pool), random(*pool)
    q = random(shape.seqs * shape.queries, shape.heads, shape.head_size)
    integers = {"device": device, "dtype": torch.int32}
    starts = torch.arange(shape.seqs + 1, **integers) * shape.queries
    lens = torch.full((shape.seqs,), shape.context, **integers)
    tables = torch.tensor(problem.block_tables.tolist(), **integers)

    def run() -> Any:
        return attend(
            q=q,
            k=k,
            v=v,
            max_seqlen_q=shape.queries,
            cu_seqlens_q=starts,
            max_seqlen_k=shape.context,
            seqused_k=lens,
            block_table=tables,
            causal=True,
        )

    return run, _synchronise(torch)


PEERS: dict[str, Callable[..., Peer]] = {
    "jax paged_attention": jax_paged_attention,
    "jax cudnn, contiguous": jax_cudnn,
    "torch sdpa, contiguous": torch_sdpa,
    "flashinfer": flashinfer,
    "vllm flash_attn": vllm_paged,
}


def peers(problem: gpu_problems.Problem) -> Iterator[tuple[str, Peer | None, str]]:
    """(name, peer, "") of each that can do this problem, else (name, None, why not)."""
    for name, make in PEERS.items():
        try:
            yield name, make(problem), ""
        except Exception as error:  # a peer that breaks must not take the suite with it
            yield name, None, f"{type(error).__name__}: {error}"[:300]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"not installed: {error}") from error


def _torch() -> tuple[Any, str]:
    """PyTorch and the device to use: the GPU, or the CPU where JAX has none either."""
    torch = _import("torch")
    if not torch.cuda.is_available() and jax.default_backend() != "cpu":
        raise Absent("torch sees no GPU")
    return torch, "cuda" if torch.cuda.is_available() else "cpu"


def _synchronise(torch: Any) -> Callable[[Any], Any]:
    return lambda _: torch.cuda.is_available() and torch.cuda.synchronize()
