"""The offline optimum against every choice there is, and the figures of a report by hand."""

import numpy as np
import pytest

from octavo.paged.cost_model import HARDWARE, MODEL_SHAPES, CostModel, prefill_flops
from octavo.paged.replay import (
    default_capacities,
    make_report,
    optimum_hits,
    unlimited_hits,
)

from .replay_model import conversations, lru_hits, make_trace, most_hits

SHAPE = MODEL_SHAPES["llama-3.1-70b"]
COSTS = CostModel(SHAPE, HARDWARE["h100"])


def report(trace, hits):
    """The results by policy and capacity, in order."""
    results = make_report(trace, hits, COSTS)
    return {(result.policy, result.capacity): result for result in results}


def small_trace(seed):
    """Short random paths over a small alphabet, so that every choice of victims can be tried."""
    rng = np.random.default_rng(seed)
    return make_trace(*(rng.integers(0, 2, rng.integers(1, 4)).tolist() for _ in range(14)))


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_victims_hits_more_blocks_than_the_optimum(seed):
    trace = small_trace(seed)
    for capacity in range(3, 7):
        assert optimum_hits(trace, capacity).sum() == most_hits(trace, capacity)


def test_the_optimum_keeps_what_is_used_next():
    trace = make_trace(["a", "b"], ["c"], ["a", "b"], ["d"], ["c"], ["a"])
    assert optimum_hits(trace, 3).tolist() == [0, 0, 2, 0, 1, 1]
    # Two blocks: b's neighbour c would be used later than a and b, so c is not kept.
    assert optimum_hits(trace, 2).tolist() == [0, 0, 1, 0, 0, 1]


def test_a_request_larger_than_the_cache_changes_nothing():
    trace = make_trace(["a"], ["a", "b", "c"], ["a"], ["a", "b"])
    assert optimum_hits(trace, 2).tolist() == [0, 0, 1, 1]
    assert report(trace, {("lru", 2): lru_hits(trace, 2)})["lru", 2].num_refused == 1
    with pytest.raises(ValueError, match="capacity=0"):
        optimum_hits(trace, 0)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_lies_between_lru_and_an_unlimited_cache(seed):
    trace = conversations(seed)
    previous, unlimited = 0, unlimited_hits(trace)
    for capacity in (24, 40, 60, 100, 200, trace.num_symbols):
        best = optimum_hits(trace, capacity)
        assert lru_hits(trace, capacity).sum() <= best.sum() <= unlimited.sum()
        assert best.sum() >= previous
        previous = best.sum()
    np.testing.assert_array_equal(optimum_hits(trace, trace.num_symbols), unlimited)
    np.testing.assert_array_equal(lru_hits(trace, trace.num_symbols), unlimited)


def test_a_request_without_a_full_block_hits_nothing():
    trace = make_trace([], ["a"], [], ["a"])
    for hits in (optimum_hits(trace, 1), unlimited_hits(trace)):
        assert hits.tolist() == [0, 0, 0, 1]
    nothing = make_trace([], [])
    assert report(nothing, {("lru", 1): lru_hits(nothing, 1)})["lru", 1].hit_ratio == 0
    assert default_capacities(nothing) == [1]


def test_the_figures_are_those_worked_out_by_hand():
    # 4 tokens a block: b hits one block of two, the third request all of two, d none.
    trace = make_trace(["a", "b"], ["a", "c"], ["a", "b"], ["d"])
    result = report(trace, {("lru", 3): np.array([0, 1, 2, 0], np.int32)})["lru", 3]
    spans = [(0, 8), (4, 8), (7, 8), (0, 4)]  # the last token is always computed
    whole = sum(prefill_flops(SHAPE, 0, stop) for _, stop in spans)
    flops = sum(prefill_flops(SHAPE, *span) for span in spans)
    seconds = sum(COSTS.seconds_to_recompute(*span) for span in spans)
    assert (result.num_requests, result.num_refused, result.num_hit_blocks) == (4, 0, 3)
    assert result.hit_ratio == pytest.approx(3 / 7)
    assert result.recomputed_tokens == 8 + 4 + 1 + 4
    assert result.recomputed_flops == pytest.approx(flops)
    assert result.saved_flops_share == pytest.approx(1 - flops / whole)
    assert result.prefill_seconds == pytest.approx(seconds)


def test_a_hit_of_a_last_block_that_is_not_full_leaves_one_token():
    trace = make_trace(["a", "b"], ["a", "b"])
    trace.num_tokens[:] = 5
    result = report(trace, {("lru", 2): np.array([0, 2], np.int32)})["lru", 2]
    assert result.recomputed_tokens == 5 + 1


def test_the_gap_closed_goes_from_lru_to_the_optimum():
    trace = conversations(0)
    capacities = (40, 24)
    hits = {}
    for capacity in capacities:
        worst, best = lru_hits(trace, capacity), optimum_hits(trace, capacity)
        hits |= {("lru", capacity): worst, ("none", capacity): np.zeros_like(worst)}
        hits["perfect", capacity] = best
    results = report(trace, hits)
    policies = ["lru", "none", "perfect", "optimum"]
    expected = [(policy, capacity) for capacity in (24, 40) for policy in policies]
    assert list(results) == [*expected, ("unlimited", None)]
    for capacity in capacities:
        closed = [results[policy, capacity].gap_closed for policy in policies]
        assert closed[0] == 0 and closed[2] == closed[3] == 1
        assert closed[1] is not None and closed[1] < 0
    assert results["unlimited", None].gap_closed is None


def test_there_is_no_gap_to_close_without_lru_or_with_room_for_everything():
    trace = conversations(1)
    hits = optimum_hits(trace, 40)
    assert report(trace, {("lfu", 40): hits})["lfu", 40].gap_closed is None
    size = trace.num_symbols
    assert report(trace, {("lru", size): lru_hits(trace, size)})["lru", size].gap_closed is None


def test_sums_past_64_bits_stay_exact_enough():
    trace = make_trace(*[[0]] * 100)
    trace.num_tokens[:] = 2**31 - 1
    result = report(trace, {("lru", 1): np.zeros(100, np.int32)})["lru", 1]
    assert result.recomputed_flops == pytest.approx(100 * prefill_flops(SHAPE, 0, 2**31 - 1))


@pytest.mark.parametrize("hits", [[0, 3], [0, -1], [0], [0, 0, 0]])
def test_impossible_hits_are_refused(hits):
    trace = make_trace(["a", "b"], ["a", "b"])
    with pytest.raises(ValueError, match="hits"):
        report(trace, {("lru", 2): np.array(hits, np.int32)})


def test_default_capacities_tell_policies_apart():
    trace = conversations(0)
    sizes = default_capacities(trace)
    assert sizes == [50, 100, 200]
    assert max(trace.num_blocks) <= sizes[0] and sizes[-1] < trace.num_symbols
    assert default_capacities(make_trace(["a", "b"], ["a"])) == [2]
