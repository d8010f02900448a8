"""A long run of random operations on the block manager, bad ones included; nothing may break.

    python benchmarks/block_manager_soak.py [--operations 1000000] [--seed 0] [--json FILE]

The operations run in compiled batches. After each one, inside the program: references equal table
entries, every block is in one state, pins keep the budget, a refused operation has changed nothing,
what was found is what was asked for, and nobody writes a block that others hold or find. After
each batch, on the host: all invariants; and now and then that releasing everything leaves nothing
held. It ends with exit status 1 if anything was broken.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import paged

SEATS, COLUMNS, SIZE, BLOCKS, NEW, BUDGET = 8, 6, 4, 40, 2, 12
ROWS, WORDS, BATCH = 3, 16, 1_000
ODD = (-1, -(2**31), 2**31 - 1, SEATS, 1_000_003)
LEAK_CHECK = 10  # batches from one to the next; the eviction policy changes there too


class Caller(NamedTuple):
    """What the callers of the manager know of their sequences."""

    tokens: jax.Array  # int32[S, M * B]
    length: jax.Array  # int32[S] tokens written
    namespace: jax.Array  # int32[S]


class World(NamedTuple):
    state: paged.CacheState
    tables: paged.BlockTables
    caller: Caller


# The world after an operation, whether it was done, copies made and own promises broken.
Outcome = tuple[World, jax.Array, jax.Array, jax.Array]


def start() -> World:
    state = paged.init_cache(BLOCKS, SIZE, pin_budget=BUDGET, history_len=16)
    # The access clock passes its limit during the run.
    state = replace(state, index=replace(state.index, clock=jnp.int32((1 << 30) - 50_000)))
    zeros = jnp.zeros(SEATS, jnp.int32)
    caller = Caller(jnp.zeros((SEATS, COLUMNS * SIZE), jnp.int32), zeros, jnp.copy(zeros))
    return World(state, paged.init_tables(SEATS, COLUMNS), caller)


def outcome(ok: jax.Array, copies: jax.Array | int = 0, *wrong: jax.Array):
    return ok, how_many(jnp.asarray(copies) != 0), how_many(*wrong)


def how_many(*flags: jax.Array) -> jax.Array:
    return sum((jnp.sum(flag, dtype=jnp.int32) for flag in flags), jnp.int32(0))


def number(word: jax.Array, below: int) -> jax.Array:
    """Mostly one of [0, below), sometimes one that no caller should pass."""
    strange = jnp.array(ODD, jnp.int32)[(word >> 5) % len(ODD)]
    return jnp.where(word % 32 == 0, strange, (word >> 5) % below)


def seat_of(world: World, word: jax.Array, *, live: bool) -> jax.Array:
    """Mostly a seat that is in use, or that is not."""
    fits = (world.tables.num_blocks > 0) == live
    fitting = jnp.argsort(~fits)[(word >> 5) % jnp.maximum(jnp.sum(fits), 1)]
    return jnp.where(word % 32 == 0, number(word >> 5, SEATS), fitting.astype(jnp.int32))


def seats_of(world: World, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Seats in use, mostly distinct, and which of them count."""
    first = seat_of(world, word, live=True)
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    seats = jnp.where(rows == 0, first, (first + rows) % SEATS)
    used = world.tables.num_blocks[jnp.clip(seats, 0, SEATS - 1)] > 0
    return seats, (rows == 0) | (used & ((word >> (8 + rows)) % 2 > 0))


def prompt_of(words: jax.Array) -> jax.Array:
    """Tokens `int32[M * B]` that go along one of a few stems and leave it somewhere."""
    place = jnp.arange(COLUMNS * SIZE, dtype=jnp.int32)
    stem = jnp.where(place < words[0] % 20, words[1] % 4, 4 + words[2] % 16)
    return (stem * 40_503 + place * 30_011 >> 4) % 3


def admit(world: World, words: jax.Array) -> Outcome:
    state, tables, caller = world
    seat, prompt = seat_of(world, words[0], live=False), prompt_of(words[1:4])
    count, namespace = number(words[4], COLUMNS * SIZE + 2), words[5] % 2
    old, cut = state.index, prompt.reshape(COLUMNS, SIZE)
    state, tables, got = paged.admit(
        *(state, tables, seat, cut, count, namespace),
        max_cached_tokens=jnp.where(words[6] % 4 > 0, count - 1, number(words[7], 25)),
        min_copied_tokens=1 + words[8] % 3,
        priority=jnp.where(words[9] % 4 > 0, 0, number(words[10], 3)),
        resumed=words[11] % 4 == 0,
    )
    row = tables.block_ids[jnp.clip(seat, 0, SEATS - 1)]
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), row[:-1]])
    right = (old.parent[row] == before) & (old.namespace[row] == namespace)
    right &= (old.num_tokens[row] == SIZE) & jnp.all(old.tokens[row] == cut, axis=1)
    found, place = got.num_cached_tokens, jnp.arange(COLUMNS * SIZE, dtype=jnp.int32)
    missed = ~right & (jnp.arange(COLUMNS) < found // SIZE)
    source, here = got.copies.source, jnp.minimum(found // SIZE, COLUMNS - 1)
    copied = (place[:SIZE] < found % SIZE) & (old.tokens[source] != cut[here])
    copied |= found % SIZE > old.num_tokens[source]
    target = jnp.where(got.ok, seat, SEATS)
    caller = Caller(
        caller.tokens.at[target].set(prompt, mode="drop"),
        caller.length.at[target].set(count, mode="drop"),
        caller.namespace.at[target].set(namespace, mode="drop"),
    )
    return World(state, tables, caller), *outcome(got.ok, source, missed, copied)


def append(world: World, words: jax.Array) -> Outcome:
    state, tables, caller = world
    more = (words[:SEATS] >> 4) % 6
    wanted = jnp.where(words[:SEATS] % 3 == 0, caller.length + more, 0)
    wanted = wanted.at[words[8] % SEATS].set(number(words[9], 8))
    wanted = jnp.where(tables.num_blocks > 0, wanted, 0)
    state, tables, ok = paged.append(state, tables, wanted, NEW)
    return World(state, tables, caller), *outcome(ok)


def write(world: World, words: jax.Array) -> Outcome:
    """Copy on write, then tokens up to the ends of the blocks."""
    state, tables, caller = world
    seats, enabled = seats_of(world, words[0])
    row = jnp.clip(seats, 0, SEATS - 1)
    # Going back is what `truncate` is for: elsewhere than at its end a sequence is not written.
    strange = jnp.array(ODD[:3], jnp.int32)[words[2] % 3]
    at = jnp.where(words[1] % 16 == 0, strange, caller.length[row])
    enabled &= (words[1] % 16 == 0) | (at < tables.num_blocks[row] * SIZE)
    state, tables, copies, ok = paged.copy_on_write(state, tables, seats, at, enabled=enabled)
    writes = enabled & ok & (at == caller.length[row])
    block = tables.block_ids[row, jnp.clip(at // SIZE, 0, COLUMNS - 1)]
    shared = state.pool.ref_count[block] != 1
    wrong = enabled & ok & (shared | (at % SIZE < state.index.num_tokens[block]))
    end = jnp.minimum(at + 1 + words[3:6] % SIZE, (at // SIZE + 1) * SIZE)
    place = jnp.arange(COLUMNS * SIZE, dtype=jnp.int32)
    written = jnp.zeros((SEATS, COLUMNS * SIZE), bool)
    fresh = writes[:, None] & (place >= at[:, None]) & (place < end[:, None])
    written = written.at[jnp.where(writes, seats, SEATS)].set(fresh, mode="drop")
    caller = caller._replace(
        tokens=jnp.where(written, prompt_of(words[6:9])[None], caller.tokens),
        length=caller.length.at[jnp.where(writes, seats, SEATS)].set(end, mode="drop"),
    )
    return World(state, tables, caller), *outcome(ok, copies.source, wrong)


def publish(world: World, words: jax.Array) -> Outcome:
    state, tables, caller = world
    seat, column = seat_of(world, words[0], live=True), jnp.arange(COLUMNS, dtype=jnp.int32)
    row = jnp.clip(seat, 0, SEATS - 1)
    here = jnp.clip(caller.length[row] - words[1] % 3 - column * SIZE, 0, SIZE)
    filled = paged.FilledBlocks(
        seat=jnp.broadcast_to(seat, COLUMNS),
        column=column,
        tokens=caller.tokens[row].reshape(COLUMNS, SIZE),
        num_tokens=here,
        namespace=jnp.broadcast_to(caller.namespace[row], COLUMNS),
    )
    count = jnp.where(words[2] % 16 > 0, jnp.sum(here > 0), number(words[3], 9))
    state, tables, ok = paged.publish(state, tables, filled, count.astype(jnp.int32))
    return World(state, tables, caller), *outcome(ok)


def fork(world: World, words: jax.Array) -> Outcome:
    state, tables, caller = world
    source, target = (seat_of(world, words[i], live=i == 0) for i in range(2))
    state, tables, ok = paged.fork(state, tables, source, target)
    to, row = jnp.where(ok, target, SEATS), jnp.clip(source, 0, SEATS - 1)
    caller = jax.tree.map(lambda x: x.at[to].set(x[row], mode="drop"), caller)
    return World(state, tables, caller), *outcome(ok)


def truncate(world: World, words: jax.Array) -> Outcome:
    length = world.caller.length[jnp.clip(seats_of(world, words[0])[0], 0, SEATS - 1)]
    kept = jnp.where(words[1] % 32 == 0, number(words[2], 30), length - words[3:6] % 6)
    return keep(world, words, kept, partial(paged.truncate, num_tokens=kept))


def release(world: World, words: jax.Array) -> Outcome:
    return keep(world, words, jnp.zeros(ROWS, jnp.int32), paged.release)


def keep(world: World, words: jax.Array, kept: jax.Array, op: Callable) -> Outcome:
    seats, enabled = seats_of(world, words[0])
    state, tables, ok = op(world.state, world.tables, seats=seats, enabled=enabled)
    target = jnp.where(enabled & ok, seats, SEATS)
    caller = world.caller._replace(length=world.caller.length.at[target].min(kept, mode="drop"))
    return World(state, tables, caller), *outcome(ok)


def reserve(world: World, words: jax.Array) -> Outcome:
    state, ok = paged.reserve(world.state, number(words[0], BLOCKS // 2), 4)
    return world._replace(state=state), *outcome(ok)


def pin(world: World, words: jax.Array) -> Outcome:
    state, tables, _ = world
    end = jnp.where(words[0] % 8 == 0, paged.FOREVER, state.now + words[1] % 20)
    prompt = prompt_of(words[2:5]).reshape(COLUMNS, SIZE)
    seat = seat_of(world, words[6], live=True)
    pins = (
        lambda: paged.pin_tokens(state, prompt, number(words[5], 25), words[7] % 2, end),
        lambda: paged.pin_sequence(state, tables, seat, end),
        lambda: paged.pin_namespace(state, words[7] % 8, end),
    )
    state, _, ok = jax.lax.switch(words[8] % 3, pins)
    return world._replace(state=state), *outcome(ok)


def unpin(world: World, words: jax.Array) -> Outcome:
    state, prompt = world.state, prompt_of(words[2:5]).reshape(COLUMNS, SIZE)
    tokens = lambda: paged.unpin_tokens(state, prompt, number(words[5], 25), words[7] % 2)  # noqa: E731
    state = jax.lax.cond(
        words[8] % 2 > 0, tokens, lambda: paged.unpin_namespace(state, words[7] % 2)
    )
    return world._replace(state=state), *outcome(jnp.bool_(True))


def wait(world: World, words: jax.Array) -> Outcome:
    now = world.state.now + words[0] % 4
    state = paged.acting(world.state, now=now, owner=words[1] % 5)
    return world._replace(state=state), *outcome(jnp.bool_(True))


OPERATIONS = (admit, append, write, publish, fork, truncate, release, reserve, pin, unpin, wait)
# How often each comes; requests come and go a little faster than the pool likes.
WEIGHTS = np.array([6, 3, 6, 5, 1, 2, 4, 1, 1, 1, 1])


def broken(before: World, after: World, ok: jax.Array) -> jax.Array:
    """How many promises a step has broken, whatever it was."""
    pool, index = after.state.pool, after.state.index
    refs = jnp.zeros(BLOCKS, jnp.int32).at[after.tables.block_ids].add(1).at[0].set(0)
    live = jnp.arange(BLOCKS) < pool.num_free
    free = jnp.zeros(BLOCKS, jnp.int32).at[jnp.where(live, pool.free_stack, BLOCKS)].add(1)
    cached, active = index.indexed & (pool.ref_count == 0), pool.ref_count > 0
    states = free + cached.astype(jnp.int32) + active.astype(jnp.int32)
    one_state = states == (jnp.arange(BLOCKS) > 0).astype(jnp.int32)
    pinned = how_many(index.indexed & (index.pin_until > after.state.now))
    changed = jax.tree.leaves(jax.tree.map(lambda x, y: jnp.any(x != y), before, after))
    return how_many(
        refs != pool.ref_count, ~one_state, pinned > BUDGET, ~ok & jnp.any(jnp.stack(changed))
    )


def step(world: World, drawn: tuple[jax.Array, jax.Array]) -> tuple[World, jax.Array]:
    kind, words = drawn
    after, ok, copies, wrong = jax.lax.switch(kind, OPERATIONS, world, words)
    is_publish = kind == OPERATIONS.index(publish)
    evicted = how_many(world.state.index.indexed & ~after.state.index.indexed & ~is_publish)
    folded = how_many((world.tables.block_ids != after.tables.block_ids) & is_publish)
    wrong += broken(world, after, ok)
    return after, jnp.stack([how_many(ok), evicted, folded, copies, wrong])


@partial(jax.jit, donate_argnums=0)
def run_batch(world: World, kinds: jax.Array, words: jax.Array) -> tuple[World, jax.Array]:
    return jax.lax.scan(step, world, (kinds, words))


@jax.jit
def release_all(world: World) -> tuple[paged.CacheState, paged.BlockTables, jax.Array]:
    used = world.tables.num_blocks > 0
    return paged.release(world.state, world.tables, jnp.arange(SEATS), enabled=used)


def soak(operations: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    world, rows = start(), []
    kinds_left, began = operations, time.perf_counter()
    while kinds_left:
        batch = len(rows)
        size = min(BATCH, kinds_left)
        kinds = rng.choice(len(OPERATIONS), size, p=WEIGHTS / WEIGHTS.sum()).astype(np.int32)
        words = rng.integers(0, 2**31 - 1, (size, WORDS), dtype=np.int32)
        world, counts = run_batch(world, kinds, words)
        rows.append(np.column_stack([kinds, np.asarray(counts)]))
        kinds_left -= size
        paged.check_invariants(world.state, world.tables)
        if batch % LEAK_CHECK == 0 or not kinds_left:
            state, tables, _ = release_all(world)
            paged.check_invariants(state, tables)
            assert int(paged.stats(state).num_active) == 0, "released, and yet blocks are held"
            kind = jnp.int32(batch // LEAK_CHECK % len(paged.POLICIES))
            policy = replace(world.state.policy, kind=kind, slope=jnp.float32(0.5))
            policy = replace(policy, protected=jnp.int32(BLOCKS // 4))
            world = world._replace(state=replace(world.state, policy=policy))
    done = np.concatenate(rows)
    names = [op.__name__ for op in OPERATIONS]
    counters = paged.stats(world.state).counters
    high_low = [[int(word) for word in x[::-1]] for x in (counters.queries, counters.hits)]
    commit = ["git", "describe", "--always", "--dirty"]
    return {
        "operations": operations,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        **dict(
            zip(
                ("evictions", "folds", "copies", "violations"),
                done[:, 2:].sum(0).tolist(),
                strict=False,
            )
        ),
        **{
            name: (x[0] << 32) + x[1]
            for name, x in zip(("tokens", "tokens_found"), high_low, strict=False)
        },
        "done": {name: int(done[done[:, 0] == i, 1].sum()) for i, name in enumerate(names)},
        "refused": {
            name: int((done[done[:, 0] == i, 1] == 0).sum()) for i, name in enumerate(names)
        },
        "device": f"{platform.machine()} {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "commit": subprocess.run(
            commit, capture_output=True, text=True, check=False
        ).stdout.strip(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = soak(args.operations, args.seed)
    for name, value in result.items():
        print(f"{name:15s} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
