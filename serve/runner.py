"""The device's side of the engine: weights, KV cache and block manager, and what runs on them.

Everything on device is donated from call to call; the host keeps no copy and reads back only
the tokens, and the flags that it must act on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .. import paged
from ..models import Llama, LlamaConfig
from ..pallas_kernels import cache_shape, init_kv_cache
from .config import EngineConfig
from .programs import NUM_STOP_IDS, DecodeRows, PackedRows, Programs, bucket_for, buckets
from .request import Request
from .sampling import SamplingRows

_SMALLEST_STEP = 16


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The sizes of the KV cache, resolved from model and configuration.

    Attributes:
        shape: `(P, K, B, ROW)` of one layer.
        dtype: of the cache.
        max_model_len: longest context served, in tokens.
        blocks_per_seq: width of a block table, M.
    """

    shape: tuple[int, int, int, int]
    dtype: jnp.dtype
    max_model_len: int
    blocks_per_seq: int

    @classmethod
    def of(cls, model: LlamaConfig, config: EngineConfig, weights_dtype: jnp.dtype) -> CacheLayout:
        """Resolve the sizes.

        Raises:
            ValueError: the context is longer than the model's, or the memory holds no block.
        """
        max_len = config.max_model_len or model.max_context_len
        if max_len > model.max_context_len:
            raise ValueError(
                f"max_model_len={max_len} must be at most the model's {model.max_context_len}"
            )
        dtype = weights_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        dtype = jnp.dtype(dtype)
        block = cache_shape(
            2, model.num_kv_heads, config.block_size, model.head_size, jax.default_backend()
        )[1:]
        block_bytes = model.num_layers * int(np.prod(block)) * dtype.itemsize
        num_blocks = config.num_blocks or int(config.kv_cache_gib * 2**30) // block_bytes
        if num_blocks < 2:
            raise ValueError(
                f"kv_cache_gib={config.kv_cache_gib} holds {num_blocks} blocks of "
                f"{block_bytes / 2**20:.2f} MiB; at least 2 are needed"
            )
        return cls(
            shape=(num_blocks, *block),
            dtype=dtype,
            max_model_len=max_len,
            blocks_per_seq=-(-max_len // config.block_size),
        )


class ModelRunner:
    """Runs steps on device for requests that the scheduler chose."""

    def __init__(self, model: Llama, config: EngineConfig):
        self.layout = CacheLayout.of(model.config, config, model.embed[...].dtype)
        self._config = config
        self._programs = Programs(
            model, block_size=config.block_size, max_decode_steps=config.max_decode_steps
        )
        self._token_buckets = buckets(_SMALLEST_STEP, config.max_num_batched_tokens)
        self._row_buckets = buckets(1, config.max_num_seqs)
        self._max_filled = -(-config.max_num_batched_tokens // config.block_size) + (
            config.max_num_seqs * -(-config.max_decode_steps // config.block_size)
        )
        num_blocks = self.layout.shape[0]
        self._kv_cache = init_kv_cache(
            model.config.num_layers, self.layout.shape, self.layout.dtype
        )
        self._state = paged.init_cache(num_blocks, config.block_size)
        self._tables = paged.init_tables(config.max_num_seqs, self.layout.blocks_per_seq)
        donate = partial(jax.jit, donate_argnums=(0, 1))
        self._admit = donate(paged.admit)
        self._append = donate(
            partial(
                paged.append, max_new_blocks=-(-config.max_decode_steps // config.block_size) + 1
            )
        )
        self._publish = donate(paged.publish)
        self._release = donate(paged.release)
        self._stats = jax.jit(paged.stats)

    # ---- block manager ---------------------------------------------------------------------

    def admit(self, request: Request, seat: int) -> int | None:
        """Give the request a table; returns the blocks found cached, or None if none fit."""
        padded = np.zeros((self.layout.blocks_per_seq, self._config.block_size), np.int32)
        padded.reshape(-1)[: request.num_tokens] = request.tokens[: request.num_tokens]
        self._state, self._tables, admission = self._admit(
            self._state,
            self._tables,
            np.int32(seat),
            padded,
            np.int32(request.num_tokens),
            np.int32(request.namespace),
        )
        return int(admission.num_cached_blocks) if bool(admission.ok) else None

    def reserve(self, requests: Sequence[Request], more: int) -> bool:
        """Make room for up to `more` further tokens in each request's table, or in none's."""
        lens = np.zeros(self._config.max_num_seqs, np.int32)
        for request in requests:
            # The last token that a request may generate is never written.
            most = request.num_prompt_tokens + request.max_tokens - 1
            lens[_seat(request)] = min(request.num_computed + more, most)
        self._state, self._tables, ok = self._append(self._state, self._tables, lens)
        return bool(ok)

    def publish(self, requests: Sequence[Request]) -> None:
        """Index every block of these requests that has filled since the last call."""
        size = self._config.block_size
        entries = [
            (request, column)
            for request in requests
            for column in range(request.num_published, request.num_computed // size)
        ]
        for first in range(0, len(entries), self._max_filled):
            part = entries[first : first + self._max_filled]
            seat, column, namespace = np.zeros((3, self._max_filled), np.int32)
            tokens = np.zeros((self._max_filled, size), np.int32)
            for i, (request, c) in enumerate(part):
                seat[i], column[i], namespace[i] = _seat(request), c, request.namespace
                tokens[i] = request.tokens[c * size : (c + 1) * size]
            filled = paged.FilledBlocks(
                seat=seat, column=column, tokens=tokens, namespace=namespace
            )
            self._state, self._tables, _ = self._publish(
                self._state, self._tables, filled, np.int32(len(part))
            )
        for request in requests:
            request.num_published = max(request.num_published, request.num_computed // size)

    def release(self, request: Request) -> None:
        """Give back the request's blocks; its seat is free afterwards."""
        self._state, self._tables, _ = self._release(
            self._state, self._tables, np.int32(_seat(request))
        )

    def stats(self) -> paged.CacheStats:
        """Blocks in each state."""
        return jax.device_get(self._stats(self._state))

    def check_invariants(self) -> None:
        """Check the block manager's invariants; raises `octavo.paged.InvariantViolation`."""
        paged.check_invariants(self._state, self._tables)

    # ---- model -----------------------------------------------------------------------------

    def packed(self, work: Sequence[tuple[Request, int]]) -> np.ndarray:
        """Compute the next `count` tokens of each (request, count); returns next tokens."""
        total = sum(count for _, count in work)
        size = bucket_for(total, self._token_buckets)
        num_rows = min(size, self._config.max_num_seqs)
        tokens = np.zeros(size, np.int32)
        seat, context_len, query_len = np.zeros((3, num_rows), np.int32)
        at = 0
        for i, (request, count) in enumerate(work):
            begin = request.num_computed
            tokens[at : at + count] = request.tokens[begin : begin + count]
            seat[i], context_len[i], query_len[i] = _seat(request), begin + count, count
            at += count
        rows = PackedRows(seat=seat, context_len=context_len, query_len=query_len)
        sampling = _sampling_rows([request for request, _ in work], num_rows)
        return self._run_packed(tokens, rows, sampling)[: len(work)]

    def decode(self, requests: Sequence[Request], num_steps: int) -> np.ndarray:
        """Generate up to `num_steps` tokens per request; returns `[steps, len(requests)]`.

        Entries past a request's end are -1.
        """
        num_rows = bucket_for(len(requests), self._row_buckets)
        seat, token, context_len, limit = np.zeros((4, num_rows), np.int32)
        stop_ids = np.full((num_rows, NUM_STOP_IDS), -1, np.int32)
        for i, request in enumerate(requests):
            seat[i] = _seat(request)
            token[i] = request.tokens[request.num_tokens - 1]
            context_len[i] = request.num_computed
            limit[i] = min(num_steps, request.max_tokens - request.num_generated)
            # Those that do not fit are left to the host, which checks them all.
            some = list(request.stop_ids)[:NUM_STOP_IDS]
            stop_ids[i, : len(some)] = some
        rows = DecodeRows(
            seat=seat, token=token, context_len=context_len, limit=limit, stop_ids=stop_ids
        )
        out = self._run_decode(rows, _sampling_rows(requests, num_rows), num_steps)
        return out[:num_steps, : len(requests)]

    def _run_packed(
        self, tokens: np.ndarray, rows: PackedRows, sampling: SamplingRows
    ) -> np.ndarray:
        next_tokens, self._kv_cache = self._programs.packed(
            self._programs.weights, self._kv_cache, self._tables.block_ids, tokens, rows, sampling
        )
        return np.asarray(next_tokens)

    def _run_decode(self, rows: DecodeRows, sampling: SamplingRows, num_steps: int) -> np.ndarray:
        out, self._kv_cache = self._programs.decode(
            self._programs.weights,
            self._kv_cache,
            self._tables.block_ids,
            rows,
            sampling,
            np.int32(num_steps),
        )
        return np.asarray(out)

    # ---- compilation -----------------------------------------------------------------------

    @property
    def num_traces(self) -> int:
        """Step programs traced so far; never more than `len(list(self.warmups()))`."""
        return self._programs.num_traces

    def warmups(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Every step program by name, with a call that compiles it and changes nothing."""
        for size in self._token_buckets:
            yield f"packed step of {size} tokens", partial(self._warm_packed, size)
        for size in self._row_buckets:
            yield f"decode of {size} sequences", partial(self._warm_decode, size)

    def _warm_packed(self, size: int) -> None:
        num_rows = min(size, self._config.max_num_seqs)
        seat, context_len, query_len = np.zeros((3, num_rows), np.int32)
        rows = PackedRows(seat=seat, context_len=context_len, query_len=query_len)
        self._run_packed(np.zeros(size, np.int32), rows, _sampling_rows([], num_rows))

    def _warm_decode(self, size: int) -> None:
        seat, token, context_len, limit = np.zeros((4, size), np.int32)
        stop_ids = np.full((size, NUM_STOP_IDS), -1, np.int32)
        rows = DecodeRows(
            seat=seat, token=token, context_len=context_len, limit=limit, stop_ids=stop_ids
        )
        self._run_decode(rows, _sampling_rows([], size), 0)


def _seat(request: Request) -> int:
    assert request.seat is not None, "only running requests have blocks"
    return request.seat


def _sampling_rows(requests: Sequence[Request], num_rows: int) -> SamplingRows:
    temperature, top_p, min_p = np.zeros((3, num_rows), np.float32)
    top_k, index = np.zeros((2, num_rows), np.int32)
    seed = np.zeros(num_rows, np.uint32)
    top_p[:] = 1
    for i, request in enumerate(requests):
        params = request.params
        temperature[i], top_p[i], min_p[i] = params.temperature, params.top_p, params.min_p
        top_k[i], seed[i], index[i] = params.top_k, request.seed, request.num_generated
    return SamplingRows(
        temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=seed, index=index
    )
