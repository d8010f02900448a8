"""What this machine reaches, measured in a few seconds: rates, not data sheets.

Each rate is the median of a few runs of the operation that decides it: a matrix product and the
attention of a prefill chunk, a pass over device memory, a copy from host memory to the device, and
a file written and read. The shares of `Efficiency` are then 1, but for attention, which is set
against the matrix product.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...pallas_kernels import cache_shape, init_kv_cache, paged_attention
from .hardware import Efficiency, Hardware
from .shape import ModelShape

_DTYPES = {2: jnp.bfloat16, 4: jnp.float32}
_MAX_WIDTH = 4096  # a wider matrix is no faster, and takes longer to make
_CONTEXT = 4096  # tokens that a chunk of attention sees
_BLOCK_SIZE = 16
_COPY_BYTES = 1 << 27
_PIECE_BYTES = 1 << 24
_NUM_RUNS = 3
_LEAST_SECONDS = 0.3


def calibrate(
    shape: ModelShape,
    *,
    chunk_size: int = 512,
    disk_folder: Path | None = None,
    file_bytes: int = _COPY_BYTES,
) -> Hardware:
    """Measure the default device and its host for a model of this shape.

    Args:
        shape: whose heads and dtypes to measure with.
        chunk_size: prompt tokens computed in one step.
        disk_folder: where a tier on disk would be; None measures no disk.
        file_bytes: of the file that is written there, read and removed.

    Raises:
        OSError: nothing can be written in `disk_folder`.
        ValueError: weights or cache have elements of neither two nor four bytes.
    """
    read = write = None
    if disk_folder is not None:
        read, write = disk_rates(disk_folder, file_bytes)
    device = jax.devices()[0]
    matmul = matmul_rate(shape, chunk_size)
    attention = attention_rate(shape, chunk_size)
    return Hardware(
        name=f"this machine ({device.device_kind})",
        peak_flops=matmul,
        peak_memory_bytes=memory_rate(),
        memory_bytes=_memory_bytes(device),
        peak_link_bytes=link_rate(),
        peak_disk_read_bytes=read,
        peak_disk_write_bytes=write,
        efficiency=Efficiency(
            matmul=1, attention=attention / matmul, memory=1, link=1, disk=1, remote=1
        ),
        dispatch_seconds=dispatch_seconds(),
        assumptions=("other devices, where there are several, as the first",),
    )


def matmul_rate(shape: ModelShape, chunk_size: int) -> float:
    """FLOP/s of `[chunk_size, D] @ [D, 2D]`, D the width of all heads (4,096 at most)."""
    dtype = _dtype(shape.param_dtype_bytes)
    width = min(shape.num_heads * shape.head_size, _MAX_WIDTH)
    x = jnp.full((chunk_size, width), 0.5, dtype)
    weight = jnp.full((width, 2 * width), 0.5, dtype)
    product = jax.jit(jnp.matmul)
    return 4 * chunk_size * width * width / median_seconds(lambda: product(x, weight))


def attention_rate(shape: ModelShape, chunk_size: int) -> float:
    """FLOP/s of one layer's attention for the last `chunk_size` queries of a long context."""
    dtype = _dtype(shape.kv_dtype_bytes)
    platform = jax.default_backend()
    context = max(_CONTEXT, chunk_size)
    num_blocks = -(-context // _BLOCK_SIZE)
    sizes = cache_shape(1 + num_blocks, shape.num_kv_heads, _BLOCK_SIZE, shape.head_size, platform)
    (kv_cache,) = init_kv_cache(1, sizes, dtype)
    q = jnp.full((chunk_size, shape.num_heads, shape.head_size), 0.5, dtype)
    tables = jnp.arange(1, 1 + num_blocks, dtype=jnp.int32)[None]
    lens, start = jnp.array([context], jnp.int32), jnp.array([0, chunk_size], jnp.int32)
    attend = jax.jit(partial(paged_attention, sliding_window=shape.sliding_window))
    seen = context if shape.sliding_window is None else min(shape.sliding_window, context)
    keys = chunk_size * seen - (chunk_size * chunk_size / 2 if seen == context else 0)
    flops = 4 * shape.num_heads * shape.head_size * keys
    return flops / median_seconds(lambda: attend(q, kv_cache, tables, lens, start))


def memory_rate(num_bytes: int = _COPY_BYTES) -> float:
    """Bytes per second, read and written, of a pass over an array larger than any cache."""
    scale = jax.jit(lambda x: x * np.float32(0.5), donate_argnums=0)
    held = [jnp.ones(num_bytes // 4, jnp.float32)]

    def run() -> jax.Array:
        held[0] = scale(held[0])  # in place: what allocating takes is not the memory's rate
        return held[0]

    return 2 * num_bytes / median_seconds(run)


def link_rate(num_bytes: int = _COPY_BYTES) -> float:
    """Bytes per second from host memory into a part of a device array, in pieces as a tier's.

    A device that is the host may take an array as it is, without any copy: the device array is
    updated in place, which has to copy.
    """
    piece = _aligned_ones(_PIECE_BYTES)
    update = jax.jit(
        lambda array, piece: jax.lax.dynamic_update_slice(array, piece, (0,)), donate_argnums=0
    )
    held = [jnp.zeros(2 * piece.size, jnp.float32)]
    pieces = max(num_bytes // _PIECE_BYTES, 1)

    def run() -> None:
        for _ in range(pieces):
            held[0] = update(held[0], piece).block_until_ready()

    return pieces * _PIECE_BYTES / median_seconds(run)


def _aligned_ones(num_bytes: int) -> np.ndarray:
    """`float32` ones as XLA's allocators align them: others are copied once more on a CPU."""
    data = np.empty(num_bytes + 64, np.uint8)
    start = -data.ctypes.data % 64
    ones = data[start : start + num_bytes].view(np.float32)
    ones.fill(1)
    return ones


def disk_rates(folder: Path, num_bytes: int = _COPY_BYTES) -> tuple[float, float]:
    """Bytes per second (read, written and synchronised) of a file in `folder`.

    The file is random, as keys and values are to a file system that compresses, and the system's
    cache of it is dropped where that can be done.

    Raises:
        OSError: nothing can be written in `folder`.
    """
    reads, writes = [], []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        data = np.random.default_rng(0).bytes(num_bytes)
        for _ in range(_NUM_RUNS):
            file.seek(0)
            begin = time.perf_counter()
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
            writes.append(time.perf_counter() - begin)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            while file.read(_PIECE_BYTES):
                pass
            reads.append(time.perf_counter() - begin)
    return num_bytes / statistics.median(reads), num_bytes / statistics.median(writes)


def dispatch_seconds() -> float:
    """Seconds from the call of a program that does nothing to its result on the host."""
    x = jnp.zeros((), jnp.int32)
    nothing = jax.jit(lambda x: x + 1)
    return median_seconds(lambda: nothing(x))


def median_seconds(run: Callable[[], Any]) -> float:
    """Median time of `run` with its result ready, after one run that compiles it.

    As many runs as take 0.3 s, and at least three.
    """
    jax.block_until_ready(run())
    seconds: list[float] = []
    end = time.perf_counter() + _LEAST_SECONDS
    while len(seconds) < _NUM_RUNS or time.perf_counter() < end:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _dtype(num_bytes: int) -> Any:
    if num_bytes not in _DTYPES:
        raise ValueError(f"elements of {num_bytes} bytes are not measured, only of 2 and 4")
    return _DTYPES[num_bytes]


def _memory_bytes(device: Any) -> float:
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return float(limit)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
