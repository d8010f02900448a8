"""Adapters in the engine: everybody's own answer in one batch, and nobody's keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.models import Llama, LoadedModel, LoraAdapter, save_adapter
from octavo.serve import BeamSearchParams, Engine, InvalidRequest, NoAdapterSlot, SamplingParams

from .tiny import RANK, SIZE, SLOTS, lora_engine, tiny_adapter, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def one_engine(tiny: LoadedModel) -> Engine:
    return lora_engine(tiny)


@pytest.fixture
def engine(one_engine: Engine) -> Iterator[Engine]:
    """The engine that the tests share, without adapters; each test has its own prompts."""
    yield one_engine
    for name in one_engine.adapter_names:
        one_engine.unload_adapter(name)
    assert one_engine.stats().num_active_blocks == one_engine.num_unfinished == 0
    one_engine.check_invariants()


def merged(loaded: LoadedModel, own: LoraAdapter) -> LoadedModel:
    """The model with the adapter in its weights."""
    config = loaded.config
    k, g, h = config.num_kv_heads, config.num_groups, config.head_size
    model: Llama = nnx.clone(loaded.model)
    for layer, pairs in zip(model.layers, own.layers, strict=True):
        change = {target: jnp.asarray(a @ b) for target, (a, b) in pairs.items()}
        q, key, value = change["q_proj"], change["k_proj"], change["v_proj"]
        parts = (q.reshape(-1, k, g, h), key.reshape(-1, k, 1, h), value.reshape(-1, k, 1, h))
        layer.qkv[...] += jnp.concatenate(parts, axis=2)
        layer.out[...] += change["o_proj"].reshape(k, g, h, -1)
        layer.gate_up[...] += jnp.stack([change["gate_proj"], change["up_proj"]], axis=1)
        layer.down[...] += change["down_proj"]
    return replace(loaded, model=model)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def greedy(engine: Engine, tokens: list[int], name: str | None) -> tuple[int, ...]:
    """What one request alone is answered."""
    return engine.generate(tokens, GREEDY, adapter=name)[0].token_ids


@pytest.mark.slow
def test_a_batch_of_several_adapters_answers_as_each_merged_model_alone(
    tiny: LoadedModel, engine: Engine
) -> None:
    own = [tiny_adapter(tiny.config, seed) for seed in range(SLOTS)]
    for i, one in enumerate(own):
        engine.load_adapter(f"a{i}", one)
    # Twice each: the second finds the first one's prefix, which is the others' too in tokens.
    names = [None, "a0", "a1", "a2", "a2", "a1", "a0", None]
    prompts = [[*prompt(1, 16), *prompt(2 + i, 3 + i)] for i in range(8)]
    answers = engine.generate(prompts, GREEDY, adapter=names)
    assert [a.num_cached_tokens for a in answers] == [0] * 4 + [16] * 4
    plain = tiny_engine(tiny, **SIZE, enable_prefix_caching=False)
    answered_alone = {}
    for name, model in {
        None: tiny,
        **{f"a{i}": merged(tiny, a) for i, a in enumerate(own)},
    }.items():
        plain._runner._steps.weights = jax.tree.leaves(nnx.state(model.model.packed()))
        for mine, tokens, answer in zip(names, prompts, answers, strict=True):
            if mine == name:
                assert answer.token_ids == greedy(plain, tokens, None)
        answered_alone[name] = greedy(plain, prompts[0], None)
    assert len(set(answered_alone.values())) == 1 + SLOTS


def test_the_cache_is_shared_within_an_adapter_and_by_no_others(
    tiny: LoadedModel, engine: Engine
) -> None:
    for name in "abc":
        engine.load_adapter(name, tiny_adapter(tiny.config, 0))  # even with the same weights
    cached = [
        engine.generate(prompt(20, 40), GREEDY, adapter=name)[0].num_cached_tokens
        for name in (None, "a", "b", "a", None)
    ]
    assert cached == [0, 0, 0, 39, 39]
    assert "another model, adapter" in str(engine.explain(prompt(20, 40), adapter="c"))
    assert engine.explain(prompt(20, 40), adapter="a").num_cached_tokens == 39


def test_a_reload_never_finds_what_other_weights_computed(
    tiny: LoadedModel, engine: Engine
) -> None:
    first, second = tiny_adapter(tiny.config, 3), tiny_adapter(tiny.config, 4)
    seen, answers = [], []
    for own in (first, second, first):
        version = engine.load_adapter("a", own)
        assert version == engine.load_adapter("a", own) == own.digest
        answer = engine.generate(prompt(21, 40), GREEDY, adapter="a")[0]
        seen.append(answer.num_cached_tokens)
        answers.append(answer.token_ids)
    assert seen == [0, 0, 39]  # the first weights' blocks are as good as they were
    assert answers[0] == answers[2] != answers[1]
    engine.unload_adapter("a")
    engine.load_adapter("a", first)
    assert engine.generate(prompt(21, 40), GREEDY, adapter="a")[0].num_cached_tokens == 39
    for name, own, answer in zip("bc", (first, second), answers, strict=False):
        engine.load_adapter(name, own)  # names that nothing has been cached under
        assert greedy(engine, prompt(21, 40), name) == answer


@pytest.mark.parametrize("change", ["reload", "unload"])
def test_a_request_ends_with_the_weights_that_it_began_with(
    tiny: LoadedModel, engine: Engine, change: str
) -> None:
    old, new, third = (tiny_adapter(tiny.config, seed) for seed in (5, 6, 7))
    engine.load_adapter("alone", old)
    want = [greedy(engine, prompt(30 + i, 40), "alone") for i in range(2)]
    engine.unload_adapter("alone")
    engine.load_adapter("a", old)
    running = engine.add_request(prompt(30, 40), GREEDY, adapter="a")
    begun = engine.step()  # with a token, where all of the prompt is cached
    waiting = engine.add_request(prompt(31, 40), GREEDY, adapter="a")
    if change == "reload":
        engine.load_adapter("a", new)
    else:
        engine.unload_adapter("a")
        with pytest.raises(InvalidRequest, match="'a' is not loaded; loaded: none") as refused:
            engine.add_request(prompt(32, 40), GREEDY, adapter="a")
        assert refused.value.param == "adapter"
        engine.load_adapter("b", new)
    engine.load_adapter("c", third)
    # All slots are taken until the two have ended.
    with pytest.raises(NoAdapterSlot, match="all 3 adapter slots are taken"):
        engine.load_adapter("d", third)
    got: dict[str, tuple[int, ...]] = {running: (), waiting: ()}
    for output in begun:
        got[output.request_id] += output.token_ids
    while engine.num_unfinished:
        for output in engine.step():
            got[output.request_id] += output.token_ids
    assert [got[running], got[waiting]] == want
    engine.load_adapter("d", third)


def test_preemption_and_resuming_keep_the_adapter(tiny: LoadedModel, engine: Engine) -> None:
    for i in range(SLOTS):
        engine.load_adapter(f"a{i}", tiny_adapter(tiny.config, 10 + i))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [prompt(300 + i, 60 + 7 * i) for i in range(5)]
    names = [None, "a0", "a1", "a0", "a2"]
    before = engine.stats().num_preemptions
    together = engine.generate(prompts, params, adapter=names)
    assert engine.stats().num_preemptions > before
    for tokens, name, answer in zip(prompts, names, together, strict=True):
        assert answer.token_ids == engine.generate(tokens, params, adapter=name)[0].token_ids


def test_loading_compiles_nothing_and_overwrites_in_place(tiny: LoadedModel) -> None:
    engine = lora_engine(tiny)
    names: list[str] = []
    count = engine.warmup(lambda done, total, what: names.append(what))
    # One step, loops of 1, 2, 4 sequences, ten of the block manager, and what fills a slot.
    assert count == engine.num_programs == 1 + 3 + 10 + 1 and "load adapter" in names
    before = engine._runner.adapters.leaves
    for seed in range(5):
        engine.load_adapter("a", tiny_adapter(tiny.config, seed, rank=1 + seed % RANK))
        engine.generate([prompt(seed, 20), prompt(seed, 30)], GREEDY, adapter=["a", None])
    assert engine.num_programs == count
    assert all(array.is_deleted() for array in before)


def test_what_cannot_be_loaded_changes_nothing(
    tiny: LoadedModel, engine: Engine, tmp_path: Path
) -> None:
    save_adapter(tiny_adapter(tiny.config, 0), tmp_path / "a")
    engine.load_adapter("a", tmp_path / "a")
    want = greedy(engine, prompt(50, 20), "a")
    other = replace(tiny.config, rope_theta=500.0)
    broken = tiny_adapter(tiny.config, 1)
    broken.layers[0]["q_proj"][0][0, 0] = np.inf
    for own, message in (
        (tiny_adapter(tiny.config, 1, rank=5), "rank 5; .* max_lora_rank=4"),
        (tiny_adapter(other, 1), "another configuration"),
        (broken, "not finite"),
        (tmp_path / "b", "has no adapter_config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_adapter("a", own)
    with pytest.raises(ValueError, match="must not be empty"):
        engine.load_adapter("", tiny_adapter(tiny.config, 1))
    with pytest.raises(InvalidRequest, match="'b' is not loaded; loaded: 'a'"):
        engine.unload_adapter("b")
    with pytest.raises(ValueError, match=r"2 adapters .* for 1 prompts"):
        engine.generate(prompt(50, 20), GREEDY, adapter=["a", "a"])
    assert engine.adapter_names == ("a",)
    assert greedy(engine, prompt(50, 20), "a") == want
    with pytest.raises(NoAdapterSlot, match="takes no adapters: set max_loras"):
        tiny_engine(tiny).load_adapter("a", tmp_path / "a")


@pytest.mark.slow
def test_no_bit_depends_on_who_runs_beside_an_adapter_or_on_guessing(tiny: LoadedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    prompts = [[*prompt(60, 16), *prompt(61 + i, 3 + 5 * i)] * 2 for i in range(4)]
    names = [None, "a", "b", "a"]

    def engine_of(**config) -> Engine:
        engine = lora_engine(tiny, deterministic=True, decode_slice_ms=1e6, **config)
        for i, name in enumerate("ab"):
            engine.load_adapter(name, tiny_adapter(tiny.config, 20 + i))
        return engine

    alone = engine_of(enable_prefix_caching=False)
    want = [alone.generate(p, params, adapter=n)[0] for p, n in zip(prompts, names, strict=True)]
    together = engine_of(num_speculative_tokens=3)
    for _ in range(2):  # computed, then found
        got = together.generate(prompts, params, adapter=names)
        assert [(a.token_ids, a.logprobs) for a in got] == [(a.token_ids, a.logprobs) for a in want]
    assert len({a.token_ids for a in want}) == 4


@pytest.mark.slow
def test_a_beam_search_ends_with_the_weights_that_it_began_with(tiny: LoadedModel) -> None:
    engine = lora_engine(tiny, max_loras=1)
    old, new = tiny_adapter(tiny.config, 0), tiny_adapter(tiny.config, 1)
    engine.load_adapter("a", old)
    params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    (want,) = engine.beam_search(prompt(90, 20), params, adapter="a")
    search = engine.add_branches(prompt(90, 20), params, adapter="a")
    engine.step()
    with pytest.raises(NoAdapterSlot):
        engine.load_adapter("a", new)
    tokens = [output.token_ids for _ in range(20) for output in engine.step()]
    assert tokens == [want.token_ids] and search
    engine.load_adapter("a", new)
    engine.check_invariants()
    assert engine.stats().num_active_blocks == 0
