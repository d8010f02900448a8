"""Forks, copies on write and rollbacks, in the shapes in which a user writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import paged
from octavo.pallas_kernels import copy_blocks

from .stories import admit, cache_prompt, counts, jitted, publish, story

pytestmark = pytest.mark.usefixtures("compiled_quickly")

LENGTHS = Path(__file__).parents[1] / "data" / "conversation_lengths.json"
SEQS, STEPS, SIZE, COLUMNS, BLOCKS = 8, 64, 4, 24, 200


def decode_step(carry):
    """One token for every sequence that goes on: room, a block of its own, a write, a stop."""
    state, tables, cache, context, limit = carry
    seats = jnp.arange(SEQS, dtype=jnp.int32)
    going = context < limit
    state, tables, ok = paged.append(state, tables, jnp.where(going, context + 1, 0), 1)
    state, tables, copies, copied = paged.copy_on_write(
        state, tables, seats, context, enabled=going
    )
    cache = copy_blocks(cache, copies.source, copies.target)
    # What is written says who wrote it and where, and so would any slot written by mistake.
    block = tables.block_ids[seats, context // SIZE]
    slot = jnp.where(going, block * SIZE + context % SIZE, BLOCKS * SIZE)
    value = (seats * 1000 + context).astype(jnp.float32)
    cache = cache.reshape(-1).at[slot].set(value, mode="drop").reshape(cache.shape)
    ended = going & (context + 1 >= limit) & (seats % 2 == 1)
    state, tables, released = paged.release(state, tables, seats, enabled=ended)
    done = jnp.all(jnp.stack([ok, copied, released]))
    context = jnp.where(going, context + 1, context)
    return done, (state, tables, cache, context, limit)


def start():
    state, tables = paged.init_cache(BLOCKS, SIZE), paged.init_tables(SEQS, COLUMNS)
    prompt = np.arange(COLUMNS * SIZE, dtype=np.int32).reshape(COLUMNS, SIZE)
    state, tables, got = jitted.admit(state, tables, 0, prompt, 6, 0)
    assert got.ok
    others = jnp.arange(1, SEQS, dtype=jnp.int32)
    state, tables, ok = jax.jit(paged.fork)(state, tables, jnp.zeros_like(others), others)
    assert ok
    cache = jnp.full((BLOCKS, 1, SIZE, 1), -1.0)
    context = jnp.full(SEQS, 6, jnp.int32)
    limit = 6 + STEPS - 3 * jnp.arange(SEQS, dtype=jnp.int32)
    return state, tables, cache, context, limit


def test_a_decode_loop_is_one_program_and_does_what_single_steps_do() -> None:
    @jax.jit
    @chex.assert_max_traces(1)
    def loop(carry):
        def body(pair):
            ok, carry = pair
            done, carry = decode_step(carry)
            return ok & done, carry

        return jax.lax.while_loop(
            lambda pair: jnp.any(pair[1][3] < pair[1][4]), body, (jnp.bool_(True), carry)
        )

    ok, together = loop(start())
    assert ok
    carry, step = start(), jax.jit(decode_step)
    for _ in range(STEPS):
        done, carry = step(carry)
        assert done
        paged.check_invariants(*carry[:2])
    jax.tree.map(np.testing.assert_array_equal, together, carry)

    state, tables, cache, context, _ = together
    cache, ids = np.asarray(cache).reshape(BLOCKS, SIZE), np.asarray(tables.block_ids)
    for seat in range(0, SEQS, 2):
        at = np.arange(6, context[seat])
        assert (cache[ids[seat, at // SIZE], at % SIZE] == seat * 1000 + at).all()
    # The prompt's first block is one block still; odd sequences have given theirs back.
    assert int(state.pool.ref_count[ids[0, 0]]) == SEQS // 2
    assert not ids[1::2].any()


def test_parallel_samples_take_the_prompt_once() -> None:
    state, tables = story(64, seats=16)
    prompt = list(range(18))
    state, tables, got = admit(state, tables, 0, prompt)
    assert got.ok and counts(state)[2] == 5
    others = jnp.arange(1, 16, dtype=jnp.int32)
    state, tables, ok = paged.fork(state, tables, jnp.zeros_like(others), others)
    assert ok and counts(state)[2] == 5
    seats = jnp.arange(16, dtype=jnp.int32)
    state, tables, copies, ok = paged.copy_on_write(state, tables, seats, jnp.full(16, 18))
    # Fifteen copies of the tail: one of the sixteen keeps it.
    assert ok and counts(state)[2] == 5 + 15
    assert len(set(np.asarray(copies.target).tolist()) - {0}) == 15
    paged.check_invariants(state, tables)


@pytest.mark.slow
def test_a_rollback_is_going_on_from_the_old_state() -> None:
    state, tables = story(16)
    state, tables, _ = admit(state, tables, 0, list(range(10)))
    kept = (state, tables)
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(kept)]
    state, tables, ok = paged.truncate(state, tables, 0, 3)
    assert ok and counts(state) == (14, 0, 1)
    state, tables, ok = paged.append(state, tables, jnp.array([40, 0, 0, 0], jnp.int32), 12)
    assert ok and counts(state)[2] == 10
    for old, leaf in zip(leaves, jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(old, leaf)
    paged.check_invariants(*kept)


def test_what_is_found_is_never_written_after_a_truncation() -> None:
    state, tables = story(16)
    prompt = list(range(8))
    state, tables, _ = admit(state, tables, 0, prompt)
    state, tables = publish(state, tables, 0, prompt)
    state, tables, ok = paged.truncate(state, tables, 0, 6)
    assert ok
    state, tables, copies, ok = paged.copy_on_write(state, tables, 0, 6)
    assert ok and int(copies.source[0]) and int(copies.target[0])
    # The old block is still found with its eight tokens.
    _, _, got = admit(state, tables, 1, [*prompt, 9])
    assert int(got.num_cached_tokens) == 8
    paged.check_invariants(state, tables)


def test_reuse_goes_to_the_token() -> None:
    state, tables = paged.init_cache(256, 16), paged.init_tables(4, 70)
    prompt = list(range(1000))
    state, tables, _ = cache_prompt(state, tables, prompt)
    # 1,000 tokens are 62 blocks and 8 tokens: whole blocks would give 992.
    state, tables = cache_tail(state, tables, prompt)
    _, _, got = admit(state, tables, 0, [*prompt, 5000, 5001])
    assert int(got.num_cached_tokens) == 1000
    _, _, got = admit(state, tables, 0, prompt)
    assert int(got.num_cached_tokens) == 999


def cache_tail(state, tables, tokens):
    state, tables, got = admit(state, tables, 0, tokens)
    assert got.ok
    size = state.index.block_size
    filled = paged.FilledBlocks(
        seat=np.zeros(1, np.int32),
        column=np.full(1, len(tokens) // size, np.int32),
        tokens=np.pad(np.array(tokens[-(len(tokens) % size) :], np.int32), (0, 8))[None],
        num_tokens=np.full(1, len(tokens) % size, np.int32),
        namespace=np.zeros(1, np.int32),
    )
    state, tables, ok = jitted.publish(state, tables, filled, 1)
    assert ok
    state, tables, ok = jitted.release(state, tables, 0)
    assert ok
    return state, tables


def test_an_active_block_that_is_not_full_can_be_copied_from() -> None:
    state, tables = story(16)
    state, tables, _ = admit(state, tables, 0, list(range(6)))
    filled = paged.FilledBlocks(
        seat=np.zeros(2, np.int32),
        column=np.arange(2, dtype=np.int32),
        tokens=np.array([[0, 1, 2, 3], [4, 5, 0, 0]], np.int32),
        num_tokens=np.array([4, 2], np.int32),
        namespace=np.zeros(2, np.int32),
    )
    state, tables, ok = jitted.publish(state, tables, filled, 2)
    assert ok
    state, tables, got = admit(state, tables, 1, [0, 1, 2, 3, 4, 5, 6, 7])
    assert int(got.num_cached_tokens) == 6
    assert int(got.copies.source) == int(tables.block_ids[0, 1])
    assert int(got.copies.target) == int(tables.block_ids[1, 1])
    paged.check_invariants(state, tables)


def test_waste_is_under_one_percent_of_the_slots_of_real_lengths() -> None:
    lengths = np.array(json.loads(LENGTHS.read_text())["lengths"], np.int32)
    columns = -(-int(lengths.max()) // 16)
    tables = paged.init_tables(len(lengths), columns)
    tables = replace(tables, num_blocks=jnp.asarray(-(-lengths // 16)))
    allocated, unfilled = paged.unfilled_slots(tables, jnp.asarray(lengths), 16)
    assert int(allocated) - int(unfilled) == lengths.sum()
    assert int(unfilled) / int(allocated) < 0.01


@pytest.mark.slow
def test_lanes_of_a_vmap_do_what_single_ones_do_when_only_some_evict() -> None:
    state, tables = story(8, columns=4)
    prompts = jax.random.randint(jax.random.key(1), (2, 9, 4, 4), 0, 3)
    spans = jnp.array([4, 16])

    def serve(span, prompts):
        def one(carry, prompt):
            state, tables = carry
            state, tables, got = paged.admit(state, tables, 0, prompt, span, 0)
            filled = paged.FilledBlocks(
                seat=jnp.zeros(4, jnp.int32),
                column=jnp.arange(4, dtype=jnp.int32),
                tokens=prompt,
                num_tokens=jnp.full(4, 4, jnp.int32),
                namespace=jnp.zeros(4, jnp.int32),
            )
            state, tables, _ = paged.publish(state, tables, filled, span // 4)
            state, tables, _ = paged.release(state, tables, 0)
            return (state, tables), got.num_cached_tokens

        return jax.lax.scan(one, (state, tables), prompts)

    many, found = jax.jit(jax.vmap(serve))(spans, prompts)
    alone = jax.jit(serve)
    for i in range(2):
        one, here = alone(spans[i], prompts[i])
        np.testing.assert_array_equal(found[i], here)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], many), one)
