"""The vmapped replay is the engine's block manager: LRU as a plain cache does it, lane by lane."""

import numpy as np
import pytest

from octavo.paged.cost_model import MODEL_SHAPES
from octavo.paged.eviction import POLICIES
from octavo.paged.replay import TraceBuilder, optimum_hits, replay_policies, unlimited_hits

from .replay_model import conversations, lru_hits

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SHAPE = MODEL_SHAPES["llama-3.1-8b"]
# A pool of 32 with one block withheld, a full one, and one that holds everything.
CAPACITIES = (30, 31, 1023)


@pytest.fixture(scope="module")
def replayed():
    """A trace of more than one run, and what every policy found in it."""
    trace = conversations(0, num_turns=300)
    calls = []
    hits = replay_policies(
        trace, POLICIES, CAPACITIES, shape=SHAPE, progress=lambda *call: calls.append(call)
    )
    return trace, hits, calls


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_lru_finds_what_a_plain_lru_cache_finds(replayed, capacity):
    trace, hits, _ = replayed
    np.testing.assert_array_equal(hits["lru", capacity], lru_hits(trace, capacity))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_optimum_and_all_agree_where_everything_fits(replayed, policy):
    trace, hits, _ = replayed
    for capacity in CAPACITIES:
        assert hits[policy, capacity].sum() <= optimum_hits(trace, capacity).sum()
    np.testing.assert_array_equal(hits[policy, CAPACITIES[-1]], unlimited_hits(trace))


def test_policies_differ(replayed):
    _, hits, _ = replayed
    assert len({hits[policy, 30].tobytes() for policy in POLICIES}) == len(POLICIES)


def test_progress_ends_with_all_requests(replayed):
    trace, _, calls = replayed
    assert calls[0][0] == 0 and calls[-1][:2] == (trace.num_requests, trace.num_requests)


def test_requests_too_large_or_without_blocks_and_namespaces_are_as_in_the_plain_cache():
    builder = TraceBuilder(tokens_per_block=4)
    for blocks, namespace in (
        ([1], 0), ([1, 2, 3], 0), ([], 0), ([1], 1), ([1, 2], 0), ([1], 1), ([3, 3], 0), ([1, 2], 0)
    ):  # fmt: skip
        builder.add(blocks, num_tokens=4 * len(blocks) + 1, namespace=namespace)
    trace = builder.build()
    hits = replay_policies(trace, ["lru"], [2, 3], shape=SHAPE)
    for capacity in (2, 3):
        np.testing.assert_array_equal(hits["lru", capacity], lru_hits(trace, capacity))


def test_a_mistake_is_refused():
    trace = conversations(0, num_turns=2)
    with pytest.raises(ValueError, match="capacity=0"):
        replay_policies(trace, ["lru"], [0], shape=SHAPE)
    with pytest.raises(ValueError, match="name='best'"):
        replay_policies(trace, ["best"], [8], shape=SHAPE)
