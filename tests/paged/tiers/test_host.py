"""The host tier: right blocks or none, within its budget, the least recently used first."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from octavo.paged.tiers import HostTier

from .blocks import BLOCK_BYTES, SIZES, has, held, key, payload, put, tokens


def host_tier(num_blocks: int) -> HostTier:
    return HostTier(budget_bytes=num_blocks * BLOCK_BYTES + BLOCK_BYTES // 2, **SIZES)


def test_a_block_comes_back_as_it_was_put():
    tier = host_tier(4)
    put(tier, 1, 2)
    assert held(tier, 1, 2, 3) == [1, 2]
    assert key(1) in tier and key(3) not in tier
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.num_blocks) == (2, 1, 2)
    assert stats.num_bytes == 2 * BLOCK_BYTES <= stats.budget_bytes == 4 * BLOCK_BYTES


def test_what_was_put_may_be_overwritten_by_its_owner():
    tier = host_tier(1)
    own = payload(1)
    tier.put(key(1), tokens(1), own)
    own[:] = 0
    assert has(tier, 1)


def test_other_tokens_under_a_key_are_a_miss():
    tier = host_tier(4)
    put(tier, 1)
    assert not tier.read([key(1)], tokens(2)[None], np.zeros((1, BLOCK_BYTES), np.uint8))
    assert tier.stats().misses == 1


def test_the_least_recently_used_go_and_the_budget_holds():
    tier = host_tier(3)
    put(tier, 1, 2, 3)
    tier.touch([key(1)])
    put(tier, 4)
    assert held(tier, 1, 2, 3, 4) == [1, 3, 4]
    put(tier, 1)  # again, which is a use as well
    put(tier, 5)
    assert held(tier, 1, 3, 4, 5) == [1, 4, 5]
    assert (tier.stats().evictions, tier.stats().num_blocks) == (2, 3)


def test_of_a_sequence_that_was_used_the_end_goes_first():
    tier = host_tier(3)
    put(tier, 1, 2, 3)
    tier.touch([key(1), key(2), key(3)])
    put(tier, 4)
    assert held(tier, 1, 2, 3) == [1, 2]


def test_a_cleared_tier_is_empty_and_takes_blocks():
    tier = host_tier(2)
    put(tier, 1, 2)
    tier.clear()
    assert held(tier, 1, 2) == []
    put(tier, 3, 4, 5)
    assert held(tier, 3, 4, 5) == [4, 5]


def lend(tier: HostTier, *numbers: int) -> list[int]:
    return tier.lend([key(n) for n in numbers], np.stack([tokens(n) for n in numbers]))


def test_what_is_lent_stays_as_it_is():
    tier = host_tier(8)
    put(tier, *range(8))
    slots = lend(tier, 0, 1)
    assert [bytes(tier.payloads[slot]) for slot in slots] == [bytes(payload(n)) for n in (0, 1)]
    put(tier, *range(10, 20))
    assert held(tier, 0) == [0] and held(tier, 1) == [1]
    tier.clear()
    assert held(tier, 0) == []
    put(tier, *range(20, 30))
    assert tier.stats().num_blocks == 6  # the lent ones' places are not free yet
    assert [bytes(tier.payloads[slot]) for slot in slots] == [bytes(payload(n)) for n in (0, 1)]
    tier.take_back(slots)
    put(tier, *range(30, 40))
    assert tier.stats().num_blocks == 8


def test_only_what_is_there_is_lent_and_no_more_than_a_quarter():
    tier = host_tier(8)
    put(tier, 1, 2, 3)
    assert len(lend(tier, 1, 9)) == 1  # 9 is missing
    assert lend(tier, 2, 3) == []  # three at a time
    again = lend(tier, 1)  # twice
    assert tier.lend([key(1)], tokens(2)[None]) == []
    tier.take_back(again)
    assert not tier.can_lend(2) and tier.can_lend(1)
    tier.take_back(again)
    assert len(lend(tier, 2, 3)) == 2
    assert host_tier(3).max_lent == 0


def test_places_are_never_lost_nor_given_twice():
    tier, rng = host_tier(13), np.random.default_rng(0)
    lent: list[tuple[list[int], list[int]]] = []
    for _ in range(3000):
        number = int(rng.integers(30))
        action = rng.choice(["put", "lend", "back", "clear"], p=[0.5, 0.25, 0.24, 0.01])
        if action == "put":
            put(tier, number)
        elif action == "lend" and (slots := lend(tier, number)):
            lent.append(([number], slots))
        elif action == "back" and lent:
            tier.take_back(lent.pop(int(rng.integers(len(lent))))[1])
        elif action == "clear":
            tier.clear()
        for numbers, slots in lent:
            for n, slot in zip(numbers, slots, strict=True):
                assert bytes(tier.payloads[slot]) == bytes(payload(n))
        used = [*tier._slots.values(), *tier._free, *tier._orphans]
        assert sorted(used) == list(range(13))
        assert tier._num_lent == tier._lent.sum() == sum(len(slots) for _, slots in lent)


def test_a_budget_below_one_block_is_refused():
    with pytest.raises(ValueError, match="no block"):
        HostTier(budget_bytes=BLOCK_BYTES - 1, **SIZES)


def test_many_threads_never_see_half_a_block():
    tier, wrong = host_tier(3), []

    def use(seed: int) -> None:
        numbers = np.random.default_rng(seed).integers(0, 8, 300).tolist()
        for number in numbers:
            if number % 2:
                put(tier, number)
            try:
                has(tier, number)
            except AssertionError:
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and tier.stats().hits > 0
