"""Blocks of host memory that a CPU copies from where they lie."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.serve import Engine

from .tiered import GREEDY, evict, kept, one, prompt


@pytest.fixture
def engine(tiered_engine: Engine) -> Engine:
    return tiered_engine


def test_a_device_that_is_the_host_copies_from_where_blocks_lie(
    engine: Engine, cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine._runner.tiers
    assert found is not None and found._lender is not None
    host = found._lender._tier
    monkeypatch.setattr(found, "_load", None)  # nobody reads
    one(engine, prompt(0))
    bits = kept(engine, prompt(0))
    evict(engine)
    assert len(bits) == 12 and len(kept(engine, prompt(0))) == 0
    before = host.stats()
    answer = one(engine, prompt(0))
    assert (answer.num_cached_tokens, answer.token_ids) == (96, cold(prompt(0)).token_ids)
    np.testing.assert_array_equal(kept(engine, prompt(0)), bits)
    assert host.stats().hits - before.hits == 12
    assert not host._num_lent and not found._lender._copying


def test_a_block_that_goes_before_it_is_copied_is_computed(
    engine: Engine, cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(engine, prompt(0))
    evict(engine)
    found = engine._runner.tiers
    assert found is not None and found._lender is not None
    host, lend = found._lender._tier, found._lender._tier.lend

    def forget_some(keys, tokens):
        # As if others had taken the place of the fourth meanwhile.
        host._free.append(host._slots.pop(keys[3]))
        return lend(keys, tokens)

    monkeypatch.setattr(host, "lend", forget_some)
    answer = one(engine, prompt(0))
    assert (answer.num_cached_tokens, answer.token_ids) == (24, cold(prompt(0)).token_ids)
    assert not host._num_lent
    engine.check_invariants()


def test_what_is_lent_is_given_back_whatever_happens(
    engine: Engine, cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(engine, prompt(0))
    evict(engine)
    found = engine._runner.tiers
    assert found is not None and found._lender is not None
    host, fetch, publish = found._lender._tier, found._fetch, engine._runner.publish

    def interrupted(*args):
        raise KeyboardInterrupt

    for owner, name, own in ((found, "_fetch", fetch), (engine._runner, "publish", publish)):
        monkeypatch.setattr(owner, name, interrupted)
        request_id = engine.add_request(prompt(0), GREEDY)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert not host._num_lent and not found._lender._copying
        monkeypatch.setattr(owner, name, own)
        (answer,) = engine.collect([request_id])
        assert answer.token_ids == cold(prompt(0)).token_ids
        engine.check_invariants()
        evict(engine)
