"""Pins of tiers: what is pinned stays, within a budget and for a time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.paged.tiers import DiskTier, HostTier, Tier, TierStack
from octavo.paged.tiers.block_format import num_bytes
from octavo.paged.tiers.pins import TierPins

from .blocks import BLOCK_BYTES, BLOCK_SIZE, SIZES, held, key, put

FILE_BYTES = num_bytes(BLOCK_SIZE, BLOCK_BYTES)


def keys_of(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


@pytest.fixture(params=["host", "disk"])
def new_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Tier]:
    if request.param == "host":
        return lambda count: HostTier(budget_bytes=count * BLOCK_BYTES, **SIZES)
    return lambda count: DiskTier(tmp_path, budget_bytes=count * FILE_BYTES, **SIZES)


def test_what_is_pinned_is_not_evicted_until_it_is_unpinned(new_tier):
    tier = new_tier(6)
    put(tier, 1, 2, 3)
    assert tier.pins.pin(keys_of(1, 2))
    put(tier, *range(10, 30))
    assert held(tier, 1, 2, 3) == [1, 2]
    assert held(tier, *range(10, 30)) == [26, 27, 28, 29]
    assert (tier.stats().pinned, tier.stats().num_blocks) == (2, 6)
    tier.pins.unpin(keys_of(1, 2))
    put(tier, *range(30, 36))
    assert held(tier, 1, 2) == [] and tier.stats().pinned == 0
    tier.close()


def test_more_than_half_of_a_tier_cannot_be_pinned(new_tier):
    tier = new_tier(7)
    put(tier, 1, 2, 3, 4)
    assert tier.pins.pin(keys_of(1, 2)) and not tier.pins.pin(keys_of(3, 4))
    assert tier.pins.pin(keys_of(1, 2, 3))  # two of them are
    assert not tier.pins.pin(keys_of(4)) and tier.stats().pinned == 3
    one = new_tier(1)
    assert not one.pins.pin(keys_of(1))
    tier.close()
    one.close()


def test_a_pin_ends_with_its_time(new_tier):
    tier = new_tier(4)
    put(tier, 1, 2)
    assert tier.pins.pin(keys_of(1), time.monotonic() + 0.05)
    assert tier.pins.pin(keys_of(2), time.monotonic() + 60)
    assert not tier.pins.pin(keys_of(3))
    time.sleep(0.06)
    assert tier.pins.pin(keys_of(3))  # there is room again
    put(tier, 5, 6, 7, 8)
    assert held(tier, 1, 2) == [2]
    tier.close()


def test_clearing_keeps_what_is_pinned_if_asked(new_tier):
    tier = new_tier(6)
    put(tier, 1, 2, 3)
    tier.pins.pin(keys_of(1, 2))
    tier.clear(keep_pinned=True)
    assert held(tier, 1, 2, 3) == [1, 2]
    put(tier, 4, 5, 6, 7)
    assert held(tier, *range(1, 8)) == [1, 2, 4, 5, 6, 7]
    tier.clear()
    assert held(tier, *range(1, 8)) == [] and tier.stats().pinned == 0
    put(tier, 8)
    assert tier.stats().num_blocks == 1
    tier.close()


def test_a_prefix_stays_pinned_under_what_goes_on_from_it():
    pins = TierPins(10)
    assert pins.pin(keys_of(1, 2)) and pins.pin(keys_of(1, 2, 3, 4)) and pins.pin(keys_of(1, 5))
    pins.unpin(keys_of(1, 2))
    assert [number for number in range(1, 6) if key(number) in pins] == [1, 2, 3, 4, 5]
    pins.unpin(keys_of(1, 2, 3, 4, 9))
    assert [number for number in range(1, 6) if key(number) in pins] == [1, 5]
    pins.unpin(keys_of(1, 5))
    assert len(pins) == 0


def test_pinning_again_prolongs_and_never_shortens():
    pins = TierPins(10)
    assert pins.pin(keys_of(1)) and pins.pin(keys_of(1), time.monotonic() - 1)
    assert key(1) in pins
    assert pins.pin(keys_of(2), time.monotonic() - 1) and key(2) not in pins


def test_random_pins_mean_what_a_list_of_them_means():
    rng = random.Random(0)
    pins, model = TierPins(12), {}
    for _ in range(2000):
        stem = rng.randrange(3)
        path = keys_of(*(100 * stem + i for i in range(rng.randint(1, 8))))
        if rng.random() < 0.6:
            wanted = {**model, path[-1]: path}
            fits = len({k for some in wanted.values() for k in some}) <= 12
            assert pins.pin(path) == fits
            model = wanted if fits else model
        else:
            pins.unpin(path)
            model = {last: some for last, some in model.items() if last not in path}
        pinned = {k for some in model.values() for k in some}
        assert len(pins) == len(pinned) and all(k in pins for k in pinned)


def test_a_stack_pins_where_there_is_most_room_and_only_what_is_there(tmp_path: Path):
    host = HostTier(budget_bytes=4 * BLOCK_BYTES, **SIZES)
    disk = DiskTier(tmp_path, budget_bytes=20 * FILE_BYTES, **SIZES)
    stack = TierStack([host, disk], BLOCK_BYTES)
    put(disk, 1, 2, 3, 5)
    put(host, 1)
    assert stack.pin(keys_of(1, 2, 3, 4, 5), math.inf) == 3
    assert (host.stats().pinned, disk.stats().pinned) == (0, 3)
    assert stack.pin(keys_of(4), math.inf) == 0
    stack.unpin(keys_of(1, 2, 3, 4, 5))
    assert disk.stats().pinned == 0
    stack.close()
