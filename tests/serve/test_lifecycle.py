"""An engine's life: drained, reset, given other weights, its cache kept aside and taken back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from octavo.models import Llama, LoadedModel
from octavo.serve import BeamSearchParams, Engine, EngineBusy, EngineDraining, SamplingParams

from .tiny import tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = np.random.default_rng(0).integers(0, 49152, 60).tolist()


@pytest.fixture(scope="module")
def shared(tiny: LoadedModel) -> Engine:
    return tiny_engine(tiny)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """An empty engine that nothing may leak from."""
    shared.reset_cache()
    yield shared
    stats = shared.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    shared.check_invariants()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def other_weights(tiny: LoadedModel, fingerprint: str) -> LoadedModel:
    model = Llama(tiny.config, rngs=nnx.Rngs(7))
    for layer in model.layers:
        layer.out[...] = layer.out[...] * 20
        layer.down[...] = layer.down[...] * 20
    return replace(tiny, model=model, fingerprint=fingerprint)


@pytest.mark.parametrize("cancel_waiting", [False, True])
def test_a_drained_engine_finishes_what_it_has_and_takes_nothing(
    engine: Engine, cancel_waiting: bool
) -> None:
    ids = [engine.add_request(prompt(i, 20), GREEDY) for i in range(6)]  # four seats
    outputs = engine.step()
    outputs += engine.drain(cancel_waiting=cancel_waiting)
    last = {output.request_id: output for output in outputs}
    reasons = [last[request_id].finish_reason for request_id in ids]
    end = "cancelled" if cancel_waiting else "length"
    assert reasons == ["length"] * 4 + [end] * 2
    with pytest.raises(EngineDraining, match="drained"):
        engine.add_request(PROMPT, GREEDY)
    assert engine.num_unfinished == 0
    engine.resume()
    assert len(engine.generate(PROMPT, GREEDY)[0].token_ids) == 12


def test_a_stream_keeps_its_outputs_when_the_engine_is_drained(engine: Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY)[0]
    stream = engine.stream(PROMPT, GREEDY)
    pieces = [next(stream)]
    assert engine.drain() == []
    pieces += stream
    engine.resume()
    assert sum((p.token_ids for p in pieces), ()) == whole.token_ids


def test_a_reset_forgets_all_but_what_runs(engine: Engine) -> None:
    first = engine.generate(PROMPT, GREEDY)[0]
    engine.pin(PROMPT)
    assert engine.reset_cache(keep_pinned=True) > 0
    assert engine.explain(PROMPT).num_cached_tokens == 56  # the pinned blocks
    running = engine.stream(prompt(1, 40), GREEDY)
    next(running)
    assert engine.reset_cache() == 7
    assert engine.explain(PROMPT).num_cached_tokens == 0
    assert engine.explain(prompt(1, 40)).num_cached_tokens > 0
    list(running)
    again = engine.generate(PROMPT, GREEDY)[0]
    assert (again.num_cached_tokens, again.token_ids) == (0, first.token_ids)
    assert engine.reset_cache() > 0
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("fingerprint", ["other", "tiny"])
def test_other_weights_find_nothing_of_the_old_and_compile_nothing(
    engine: Engine, tiny: LoadedModel, fingerprint: str
) -> None:
    old = engine.generate(PROMPT, GREEDY)[0].token_ids
    engine.pin(PROMPT)
    programs = engine.num_programs
    # Even where somebody gives other weights the same fingerprint.
    other = other_weights(tiny, fingerprint)
    engine.load_weights(other)
    assert engine.stats().num_cached_blocks == 0
    new = engine.generate(PROMPT, GREEDY)[0]
    assert new.num_cached_tokens == 0
    assert new.token_ids != old
    assert engine.num_programs == programs
    assert engine.loaded.fingerprint == fingerprint
    engine.load_weights(tiny)
    back = engine.generate(PROMPT, GREEDY)[0]
    assert (back.num_cached_tokens, back.token_ids) == (0, old)


@pytest.mark.parametrize("interrupted", ["reset_cache", "load_weights"])
def test_an_interrupt_between_two_weights_leaves_nothing_to_be_found_by_the_wrong_ones(
    engine: Engine, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    old = engine.generate(PROMPT, GREEDY)[0].token_ids
    snapshot = engine.cache_snapshot()
    at = engine if interrupted == "reset_cache" else engine._runner
    run = getattr(at, interrupted)

    def interrupting(*args, **kwargs):
        run(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(at, interrupted, interrupting)
    with pytest.raises(KeyboardInterrupt):
        engine.load_weights(other_weights(tiny, "tiny"))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="before other weights"):
        engine.restore_cache(snapshot)
    now = engine.generate(PROMPT, GREEDY)[0]
    assert now.num_cached_tokens == 0
    assert (now.token_ids == old) == (interrupted == "reset_cache")
    engine.load_weights(tiny)
    assert engine.generate(PROMPT, GREEDY)[0].token_ids == old


def test_new_weights_answer_as_in_an_engine_of_their_own(engine: Engine, tiny: LoadedModel) -> None:
    other = other_weights(tiny, "other")
    engine.load_weights(other)
    got = engine.generate(PROMPT, GREEDY)[0].token_ids
    engine.load_weights(tiny)
    assert got == tiny_engine(other).generate(PROMPT, GREEDY)[0].token_ids


def test_weights_of_another_architecture_are_refused(engine: Engine, tiny: LoadedModel) -> None:
    config = replace(tiny.config, num_layers=1)
    other = replace(tiny, config=config, model=Llama(config, rngs=nnx.Rngs(0)))
    before = engine.generate(PROMPT, GREEDY)[0].token_ids
    with pytest.raises(ValueError, match="another architecture"):
        engine.load_weights(other)
    assert engine.loaded.config == tiny.config
    again = engine.generate(PROMPT, GREEDY)[0]
    assert (again.num_cached_tokens, again.token_ids) == (59, before)


def test_what_needs_an_idle_engine_says_so(engine: Engine, tiny: LoadedModel) -> None:
    snapshot = engine.cache_snapshot()
    request_id = engine.add_request(PROMPT, GREEDY)
    for call in (
        engine.cache_snapshot,
        lambda: engine.restore_cache(snapshot),
        lambda: engine.load_weights(tiny),
    ):
        with pytest.raises(EngineBusy, match="1 unfinished requests"):
            call()
    engine.cancel(request_id)


def test_a_snapshot_stays_valid_and_can_be_gone_back_to_twice(engine: Engine) -> None:
    wanted = engine.generate(PROMPT, GREEDY)[0].token_ids
    snapshot = engine.cache_snapshot()
    for seed in range(2):
        # Everything is overwritten and evicted in between, and a tenant takes the next id.
        engine.reset_cache()
        *_, tenant = engine.stream(PROMPT, GREEDY, cache_salt=f"tenant {seed}")
        assert tenant.num_cached_tokens == 0
        engine.generate([prompt(50 + 10 * seed + i, 200) for i in range(9)], GREEDY)
        assert engine.explain(PROMPT).num_cached_tokens == 0
        engine.restore_cache(snapshot)
        engine.check_invariants()
        assert engine.explain(PROMPT).num_cached_tokens == 59
        assert engine.explain(PROMPT, cache_salt=f"tenant {seed}").reason == "namespace"
        again = engine.generate(PROMPT, GREEDY)[0]
        assert (again.num_cached_tokens, again.token_ids) == (59, wanted)
    assert not any(x.is_deleted() for x in jax.tree.leaves((snapshot.state, snapshot.kv_cache)))


def test_a_snapshot_of_another_engine_or_of_other_weights_is_refused(
    engine: Engine, tiny: LoadedModel
) -> None:
    with pytest.raises(ValueError, match="of another engine"):
        engine.restore_cache(tiny_engine(tiny).cache_snapshot())
    snapshot = engine.cache_snapshot()
    engine.load_weights(tiny)
    with pytest.raises(ValueError, match="before other weights"):
        engine.restore_cache(snapshot)


@pytest.mark.parametrize("tiers", [{}, {"host_cache_gib": 0.001}])
def test_an_engine_that_is_let_go_of_gives_back_its_memory_at_once(
    tiny: LoadedModel, tiers: dict[str, float]
) -> None:
    engine = tiny_engine(tiny, **tiers)
    engine.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2))
    engine.generate(PROMPT, GREEDY)
    engine.close()
    seen = weakref.ref(engine), weakref.ref(engine._runner)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert [own() for own in seen] == [None, None]
    finally:
        gc.enable()
