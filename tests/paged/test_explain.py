"""Every miss has a reason, and the advice accounts for every token."""

from __future__ import annotations

import pytest

from octavo import paged

from .stories import admit, cache_prompt, jitted, story

PREFIX = list(range(100, 140))


@pytest.fixture(scope="module")
def cached():
    state, tables = story(32)
    state, _, _ = cache_prompt(state, tables, PREFIX)
    return state


CASES = {
    "whole": (PREFIX, 39, "all but the last"),
    "ended": ([*PREFIX, 1, 2, 3], 40, "ends at token 40"),
    "diverged": ([*PREFIX[:22], 7, 8, 9], 22, "token 22 is 7, and what is cached goes on with 122"),
    "new": ([1, 2, 3, 4, 5, 6], 0, "nothing that begins like it"),
}


@pytest.mark.parametrize("reason", CASES)
def test_a_prompt_is_told_how_far_it_hits_and_why_no_further(cached, reason: str) -> None:
    prompt, found, line = CASES[reason]
    told = paged.explain(cached, prompt, 0)
    assert (told.reason, told.num_cached_tokens) == (reason, found)
    assert line in str(told)


@pytest.mark.parametrize("reason", CASES)
def test_admission_finds_what_the_explanation_says(cached, reason: str) -> None:
    prompt, found, _ = CASES[reason]
    _, _, got = admit(cached, paged.init_tables(4, 12), 0, prompt)
    assert int(got.num_cached_tokens) == found


def test_a_divergence_between_blocks_names_both_tokens(cached) -> None:
    told = paged.explain(cached, [*PREFIX[:20], 5, 5, 5, 5, 5], 0)
    assert (told.reason, told.cached_token, told.prompt_token) == ("diverged", 120, 5)


def test_too_little_of_a_block_is_not_copied_and_said_so(cached) -> None:
    told = paged.explain(cached, [*PREFIX[:22], 7, 8, 9], 0, min_copied_tokens=3)
    assert (told.reason, told.num_cached_tokens) == ("unaligned", 20)


def test_another_namespace_is_named(cached) -> None:
    told = paged.explain(cached, PREFIX, 3)
    assert (told.reason, told.other_namespace, told.num_other_tokens) == ("namespace", 0, 36)


def test_a_namespace_that_holds_no_more_is_not_blamed() -> None:
    state, tables = story(32)
    state, tables, _ = cache_prompt(state, tables, [*PREFIX[:4], 1, 2, 3], namespace=0)
    state, tables, _ = cache_prompt(state, tables, [*PREFIX[:4], 1, 2, 3], namespace=5)
    assert paged.explain(state, [*PREFIX[:4], 7, 8, 9], 0).reason != "namespace"
    assert paged.explain(state, PREFIX[:4], 9).reason == "new"


def test_an_eviction_is_remembered_with_its_time_and_owner(cached) -> None:
    tables = paged.init_tables(4, 12)
    state = paged.acting(cached, now=77, owner=5)
    state, ok = jitted.reserve(state, int(state.pool.num_free) + 4, 4)
    assert ok
    told = paged.explain(state, PREFIX, 0)
    assert (told.reason, told.num_cached_tokens) == ("evicted", 24)
    assert (told.num_evicted_tokens, told.evicted_at, told.evicted_for) == (15, 77, 5)
    # Once it is back it hits again, whatever is remembered.
    state, _, _ = cache_prompt(state, tables, PREFIX)
    assert paged.explain(state, PREFIX, 0).reason == "whole"


def test_an_empty_prompt_cannot_be_explained(cached) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        paged.explain(cached, [], 0)


def test_advice_accounts_for_every_token() -> None:
    shared = list(range(1000, 1064))
    prompts = [[i, *shared] for i in range(10)]  # what varies stands in front
    told = paged.advise(prompts, block_size=16)
    assert told.num_tokens == 650
    assert told.reused + told.copied + told.last + told.moved + told.new == 650
    assert (told.reused, told.copied, told.moved) == (0, 0, 9 * 64)
    assert told.divergences == ((0, 9, 9 * 64),)
    assert "put what varies there behind" in str(told)


def test_advice_knows_what_is_shared_well() -> None:
    shared = list(range(1000, 1064))
    told = paged.advise([[*shared, *range(i, i + 3)] for i in range(0, 30, 3)], block_size=16)
    assert (told.reused, told.copied, told.moved) == (9 * 64, 0, 0)
    told = paged.advise([shared[:40], shared[:40], [*shared[:37], 1]], block_size=16)
    assert (told.reused, told.copied, told.last, told.new) == (64, 7 + 5, 1, 41)


def test_advice_refuses_a_block_of_nothing() -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        paged.advise([[1]], block_size=0)
