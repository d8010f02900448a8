"""The tiers below the device: which an engine has, and the programs that move blocks to and fro."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from ..models import LlamaConfig
from ..paged import NamespaceKey
from ..paged.tiers import DiskTier, HostTier, RemoteTier, Tier, TierStack, further_keys, root_key
from ..pallas_kernels import NULL_BLOCK, gather_blocks, scatter_blocks
from .config import EngineConfig
from .layout import CacheLayout
from .lender import Lender
from .program import Program
from .programs import KVCache, bucket_for
from .request import Request
from .rows import seat_of
from .staging import LoadBuffers, Loaded, Staging

# What one transfer moves at most: enough to be worth a dispatch, little enough to lie about.
_BATCH_BYTES = 1 << 26
_BATCH_BLOCKS = 128
_LENT_BLOCKS = 1024  # nobody reads these first, so they come at once
_LOADERS = 2


class LowerTiers:
    """Blocks in host memory, on disk and on a server, by the requests that want them.

    Args:
        model, config, layout: of the engine; at least one tier is on.

    Attributes:
        stack: the tiers.
        batch_blocks: blocks that are read or saved at a time at most.
        most_blocks: blocks of one `load` at most.

    Raises:
        ValueError: a budget holds no block, or a URL is none.
        OSError: the folder cannot be used.
        ImportError: the remote cache's client is not installed.
    """

    def __init__(self, model: LlamaConfig, config: EngineConfig, layout: CacheLayout):
        self._block_shape = (model.num_layers, *layout.shape[1:])
        self._dtype, self._block_size = layout.dtype, config.block_size
        block_bytes = prod(self._block_shape) * layout.dtype.itemsize
        self.stack = TierStack(_tiers(config, block_bytes), block_bytes)
        most = max(_BATCH_BYTES // block_bytes, 1)
        self.most_blocks = 1 << (min(most, _LENT_BLOCKS).bit_length() - 1)
        self.batch_blocks = min(self.most_blocks, _BATCH_BLOCKS)
        self._sizes = tuple(sorted({max(self.batch_blocks // 8, 1), self.batch_blocks}))
        self._lent_sizes = tuple(sorted({*self._sizes, self.most_blocks}))
        device = jax.devices()[0]
        # Keys and values of other machines or programs are as good, but not the same bits.
        self._payload = (
            f"{self._block_shape} {layout.dtype.name} {device.platform} {device.device_kind} "
            f"jax-{jax.__version__} deterministic={bool(config.deterministic)}"
        )
        self._salt = b""
        self._staging = Staging.of(device)
        self._buffers = LoadBuffers((self.batch_blocks, *self._block_shape), self._dtype)
        # One that outlives what is done to the tables, so that this need not wait for copies.
        self._row = Program("row", row_of, donate=())
        self._pack = Program("pack", pack, donate=(), settings=self._staging)
        self._unpack = Program("unpack", unpack, donate=(0,), settings=self._staging)
        self._fetch = Program("fetch", fetch, donate=(0,))
        self._lender = Lender.of(self.stack, self._staging, self._dtype, self._block_shape)
        self.programs = (self._row, self._pack, self._unpack, self._fetch)
        self._loader = ThreadPoolExecutor(_LOADERS, "octavo-tier-loader")
        self._closed = False

    def keeps_all_of(self, num_blocks: int) -> str | None:
        """The nearest tier that holds what a device's cache of so many blocks does, if any."""
        for name, stats in self.stack.stats().items():
            # A server says nothing of its budget.
            if not stats.budget_bytes or stats.budget_bytes >= num_blocks * self.stack.block_bytes:
                return name
        return None

    def distrust(self, distrusted: bool) -> None:
        """Find nothing from now on that is there, nor let others find what will be; or do again."""
        self._salt = secrets.token_bytes(16) if distrusted else b""

    def keys(
        self, namespace: NamespaceKey, tokens: np.ndarray, known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Keys of the full blocks of `tokens: int32[n]` after those that are known."""
        root = root_key(namespace, self._payload, self._salt)
        return further_keys(known, root, tokens, self._block_size)

    def keys_of(self, request: Request, num_blocks: int) -> list[bytes]:
        """Keys of a request's blocks, at least of so many; kept with the request."""
        keys = request.block_keys
        if len(keys) < num_blocks:
            tokens = request.tokens[: num_blocks * self._block_size]
            keys += self.keys(request.namespace_key, tokens, keys)
        return keys

    def num_held(self, namespace: NamespaceKey, tokens: np.ndarray, num_cached: int) -> int:
        """How many tokens of a prompt come from here if its first `num_cached` are cached."""
        keys, size = self.keys(namespace, tokens[:-1]), self._block_size
        first = num_cached // size
        held = self.stack.num_held(keys[first:])
        return (first + held) * size - num_cached if held else 0

    def save(
        self, kv_cache: KVCache, block_ids: jax.Array, runs: Sequence[tuple[Request, int, int]]
    ) -> None:
        """Store each of some full blocks that a tier lacks; nobody waits for it.

        Args:
            kv_cache: where they are.
            block_ids: `int32[S, M]`, the tables.
            runs: (request, first column, end) of blocks that are computed, or about to be by what
                is dispatched.
        """
        missing = list(self._missing(runs))
        for start in range(0, len(missing), self.batch_blocks):
            part = missing[start : start + self.batch_blocks]
            size = bucket_for(len(part), self._sizes)
            seats, columns = np.zeros((2, size), np.int32)
            tokens = np.empty((len(part), self._block_size), np.int32)
            for i, (request, column, _) in enumerate(part):
                seats[i], columns[i] = seat_of(request), column
                first = column * self._block_size
                tokens[i] = request.tokens[first : first + self._block_size]
            packed = self._pack(size, kv_cache, block_ids, seats, columns, np.int32(len(part)))
            packed.copy_to_host_async()
            self.stack.save([key for *_, key in part], tokens, packed)

    def _missing(
        self, runs: Sequence[tuple[Request, int, int]]
    ) -> Iterator[tuple[Request, int, bytes]]:
        seen = set()
        for request, first, end in runs:
            keys = self.keys_of(request, end)[first:end]
            missing = self.stack.missing(keys)
            for column, key in enumerate(keys, first) if missing else ():
                if key in missing and key not in seen:
                    seen.add(key)
                    yield request, column, key

    def load(self, keys: Sequence[bytes], tokens: np.ndarray) -> tuple[int, Future[Loaded]]:
        """Read the first of some blocks for `put`, as far as they are there.

        Args:
            keys: of blocks that follow one another.
            tokens: `int32[n, B]`.

        Returns:
            of how many keys it is, and what was read.
        """
        if self._closed:
            return len(keys), _done(Loaded(count=0))
        for most in (self.most_blocks, self.batch_blocks):
            some = keys[:most]
            if self._lender is not None and self._lender.has(some):
                return len(some), _done(Loaded(count=len(some), keys=some, tokens=tokens[:most]))
        return len(some), self._loader.submit(self._load, some, tokens[: len(some)])

    def _load(self, keys: Sequence[bytes], tokens: np.ndarray) -> Loaded:
        buffer = self._buffers.take()
        blocks = buffer.memory[: bucket_for(len(keys), self._sizes)]
        rows = blocks.reshape(len(blocks), -1).view(np.uint8)
        count = len(self.stack.load(keys, tokens, rows))
        return Loaded(count=count, blocks=self._staging.staged(blocks), buffer=buffer)

    def row(self, block_ids: jax.Array, request: Request) -> jax.Array:
        """A request's row `int32[M]` of the tables `int32[S, M]`, as it is now."""
        return self._row(1, block_ids, np.int32(seat_of(request)))

    def put(
        self, kv_cache: KVCache, row: jax.Array, first: int, loaded: Loaded
    ) -> tuple[KVCache, int]:
        """The cache with what was loaded in it, and how many blocks that is.

        Args:
            kv_cache: where it goes.
            row: `int32[M]`, a request's; the blocks from column `first` on must be its own.
            first: the first block's column.
            loaded: what `load` gave.
        """
        if loaded.buffer is not None:
            size, count = len(loaded.blocks), loaded.count
            args = np.int32(first), np.int32(count), loaded.blocks
            kv_cache, copied = self._unpack(size, kv_cache, row, *args)
            self._buffers.give_back(loaded.buffer, copied)
            return kv_cache, count

        def copy_from(slots: list[int]) -> jax.Array:
            nonlocal kv_cache
            assert self._lender is not None
            size = bucket_for(len(slots), self._lent_sizes)
            padded = np.full(size, -1, np.int32)
            padded[: len(slots)] = slots
            args = np.int32(first), self._lender.memory, padded
            kv_cache, copied = self._fetch(size, kv_cache, row, *args)
            return copied

        assert self._lender is not None and loaded.tokens is not None
        count = self._lender.lend(loaded.keys, loaded.tokens, copy_from)
        return kv_cache, count

    def settle(self) -> None:
        """Wait until what was put is in its place, and needed no longer where it was."""
        if self._lender is not None:
            self._lender.settle()

    def close(self) -> None:
        """Store what was saved, and stop all threads; afterwards nothing is saved or loaded."""
        self._closed = True
        self._loader.shutdown()
        self.stack.close()

    def warmups(
        self, kv_cache: KVCache, block_ids: jax.Array
    ) -> list[tuple[str, Callable[[], object]]]:
        """The programs by name, with calls that compile them."""
        number, row = np.int32(0), jax.ShapeDtypeStruct(block_ids.shape[1:], block_ids.dtype)
        calls: list[tuple[str, Program, int, tuple[object, ...]]] = [
            (self._row.name, self._row, 1, (block_ids, number))
        ]
        for size in reversed(self._lent_sizes):
            some = np.zeros(size, np.int32)
            programs: list[tuple[Program, tuple[object, ...]]] = []
            if size in self._sizes:
                blocks = self._staging.like((size, *self._block_shape), self._dtype)
                programs += [
                    (self._pack, (block_ids, some, some, number)),
                    (self._unpack, (row, number, number, blocks)),
                ]
            if self._lender is not None:
                memory = self._lender.memory
                like = jax.ShapeDtypeStruct(memory.shape, memory.dtype)
                programs.append((self._fetch, (row, number, like, some)))
            calls += [
                (f"{program.name} of {size} blocks", program, size, (kv_cache, *args))
                for program, args in programs
            ]
        return [
            (name, partial(program.compile, size, *args)) for name, program, size, args in calls
        ]


def _done(loaded: Loaded) -> Future[Loaded]:
    future: Future[Loaded] = Future()
    future.set_result(loaded)
    return future


def _tiers(config: EngineConfig, block_bytes: int) -> list[Tier]:
    sizes = {"block_bytes": block_bytes, "block_size": config.block_size}
    tiers: list[Tier] = []
    if config.host_cache_gib:
        tiers.append(HostTier(budget_bytes=int(config.host_cache_gib * 2**30), **sizes))
    if config.has_disk_cache:
        budget = int(config.disk_cache_gib * 2**30)
        tiers.append(DiskTier(config.disk_cache_dir, budget_bytes=budget, **sizes))
    if config.remote_cache_url:
        tiers.append(RemoteTier(config.remote_cache_url, **sizes))
    return tiers


def pack(
    staging: Staging,
    kv_cache: KVCache,
    block_ids: jax.Array,
    seats: jax.Array,
    columns: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """The first `count` of the blocks at `seats, columns: int32[n]`, `[n, L, K, B, ROW]`."""
    live = jnp.arange(seats.shape[0], dtype=jnp.int32) < count
    ids = jnp.where(live, block_ids[seats, columns], NULL_BLOCK)
    return staging.out(jnp.stack([gather_blocks(layer, ids) for layer in kv_cache], axis=1))


def row_of(block_ids: jax.Array, seat: jax.Array) -> jax.Array:
    """One row of the tables."""
    return block_ids[seat]


def unpack(
    staging: Staging,
    kv_cache: KVCache,
    row: jax.Array,
    first: jax.Array,
    count: jax.Array,
    blocks: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """Put the first `count` of `blocks: [n, L, K, B, ROW]` into a row's columns from `first` on.

    Returns the cache, and a number that is there when all has been copied.
    """
    ids = _ids_at(row, first, jnp.arange(blocks.shape[0]) < count)
    blocks = staging.into(blocks)
    layers = enumerate(kv_cache)
    kv_cache = tuple(scatter_blocks(layer, ids, blocks, layer=i) for i, layer in layers)
    return kv_cache, count + 0


def fetch(
    kv_cache: KVCache, row: jax.Array, first: jax.Array, memory: jax.Array, slots: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Put blocks of `memory: [m, L, K, B, ROW]` into a row's columns from `first` on.

    `slots: int32[n]` says which; negative ones are padding. Returns the cache, and a number that is
    there when all has been copied.
    """
    ids = _ids_at(row, first, slots >= 0)
    layers = enumerate(kv_cache)
    kv_cache = tuple(
        scatter_blocks(layer, ids, memory, layer=i, sources=slots) for i, layer in layers
    )
    return kv_cache, first + 0


def _ids_at(row: jax.Array, first: jax.Array, live: jax.Array) -> jax.Array:
    """Blocks in a row's columns from `first` on, null where `live: bool[n]` is not."""
    column = first + jnp.arange(live.shape[0], dtype=jnp.int32)
    return jnp.where(live, row[jnp.minimum(column, row.shape[0] - 1)], NULL_BLOCK)
