"""Tiers together: saved by a thread, found in the fastest, brought back up, stopped whole."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.paged.tiers import DiskTier, HostTier, TierStack

from .blocks import BLOCK_BYTES, SIZES, has, key, payload, tokens


@pytest.fixture
def new_stack(tmp_path: Path):
    """Makes stacks of a host tier and a disk tier in one folder, and closes them in the end."""
    stacks = []

    def make(host: int = 4, disk: int = 100) -> TierStack:
        tiers = [HostTier(budget_bytes=host * BLOCK_BYTES, **SIZES)] if host else []
        budget = disk * (BLOCK_BYTES + 128)
        tiers += [DiskTier(tmp_path, budget_bytes=budget, **SIZES)] if disk else []
        stacks.append(TierStack(tiers, BLOCK_BYTES))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.close()
    assert not any(thread.name.startswith("octavo-tier") for thread in threading.enumerate())


def keys_of(numbers) -> list[bytes]:
    return [key(number) for number in numbers]


def tokens_of(numbers) -> np.ndarray:
    return np.stack([tokens(number) for number in numbers])


def save(stack: TierStack, *numbers: int) -> None:
    packed = np.stack([payload(number) for number in numbers] + [payload(99)])  # and padding
    packed = jnp.asarray(packed.view(np.float32).reshape(len(packed), 2, 8, -1))
    stack.save(keys_of(numbers), tokens_of(numbers), packed)


def load(stack: TierStack, *numbers: int) -> list[str]:
    out = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
    sources = stack.load(keys_of(numbers), tokens_of(numbers), out)
    for row, number, _ in zip(out, numbers, sources, strict=False):
        assert np.array_equal(row, payload(number))
    return sources


def test_what_was_saved_is_in_all_tiers_and_read_from_the_fastest(new_stack):
    stack = new_stack()
    save(stack, 1, 2, 3)
    stack.flush()
    assert all(has(tier, number) for tier in stack.tiers for number in (1, 2, 3))
    assert load(stack, 1, 2, 3) == ["host"] * 3
    assert stack.missing([key(1), key(4)]) == {key(4)}


def test_what_the_host_has_no_room_for_comes_from_disk_and_is_brought_up(new_stack):
    stack = new_stack(host=2)
    save(stack, 1, 2, 3, 4)
    stack.flush()
    # The start of a sequence stays longest.
    assert [has(stack.tiers[0], number) for number in (1, 2, 3, 4)] == [True, True, False, False]
    assert load(stack, 1, 2, 3, 4) == ["host", "host", "disk", "disk"]
    assert load(stack, 3, 4) == ["host", "host"]
    assert stack.missing([key(1)])  # the host lacks it now


def test_a_run_ends_at_the_first_block_that_no_tier_has(new_stack):
    stack = new_stack()
    save(stack, 1, 2)
    save(stack, 4)
    assert stack.num_held(keys_of([1, 2, 3, 4])) == 2  # waits for what is on its way
    assert stack.num_held(keys_of([3])) == 0
    assert load(stack, 1, 2, 3, 4) == ["host", "host"]


def test_a_damaged_block_ends_the_run_that_was_promised(new_stack, tmp_path, caplog):
    first = new_stack(host=0)
    save(first, 1, 2, 3)
    first.close()
    path = tmp_path / f"{key(2).hex()}.kv"
    path.write_bytes(path.read_bytes()[:-1])
    stack = new_stack()
    assert stack.num_held(keys_of([1, 2, 3])) == 3
    assert load(stack, 1, 2, 3) == ["disk"]
    assert stack.stats()["disk"].errors == len(caplog.messages) == 1


def test_what_is_on_its_way_is_not_saved_again(new_stack, monkeypatch):
    stack, go_on = new_stack(disk=0), threading.Event()
    put = stack.tiers[0].put
    monkeypatch.setattr(stack.tiers[0], "put", lambda *args: (go_on.wait(), put(*args)))
    save(stack, 1)
    assert not stack.missing([key(1)])
    go_on.set()
    assert stack.num_held(keys_of([1])) == 1


def test_a_batch_that_fails_is_logged_and_forgotten_and_the_next_is_saved(new_stack, caplog):
    class Broken:
        def __array__(self, *args, **kwargs):
            raise RuntimeError("the device is gone")

    stack = new_stack()
    stack.save(keys_of([1]), tokens_of([1]), Broken())
    save(stack, 2)
    with caplog.at_level(logging.ERROR):
        stack.flush()
    assert "1 blocks could not be saved" in caplog.text
    assert stack.missing([key(1)]) and load(stack, 2) == ["host"]


def test_clearing_forgets_the_tiers_that_are_named_and_what_is_on_its_way(new_stack):
    stack = new_stack()
    save(stack, 1, 2)
    stack.clear(["host"])
    assert load(stack, 1) == ["disk"]
    save(stack, 3)
    stack.clear(["host", "disk"])
    assert load(stack, 1) == load(stack, 2) == load(stack, 3) == []


def test_a_closed_stack_has_stored_everything_and_takes_nothing(new_stack):
    stack = new_stack(host=0)
    for number in range(0, 40, 4):
        save(stack, *range(number, number + 4))
    stack.close()
    stack.close()
    save(stack, 50)
    stack.flush()  # does not wait for what will never come
    assert stack.missing([key(50)]) and stack.num_held(keys_of([50])) == 0
    assert load(new_stack(host=0), *range(40)) == ["disk"] * 40


def test_saved_blocks_let_go_of_the_devices_memory(new_stack):
    stack = new_stack()
    packed = jnp.asarray(payload(1).view(np.float32).reshape(1, -1))
    gone = weakref.ref(packed)
    stack.save(keys_of([1]), tokens_of([1]), packed)
    stack.flush()
    del packed
    gc.collect()
    assert gone() is None
