"""What the engine promises, on a small model: sharing, limits, cancelling, preemption, programs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.paged import POLICIES, PinBudgetExceeded
from octavo.serve import Engine, EngineConfig, InvalidRequest, SamplingParams

from .tiny import tiny_engine

# Blocks of eight tokens: room for two or three of the requests below. Engines of one size share
# compiled programs, so there are only two sizes here.
SMALL_POOL = 25
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel) -> Engine:
    return tiny_engine(tiny)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    engine.check_invariants()


def alone(tiny: LoadedModel, prompts, params=GREEDY) -> list[tuple[int, ...]]:
    plain = tiny_engine(tiny, enable_prefix_caching=False)
    return [plain.generate(p, params)[0].token_ids for p in prompts]


def drain(engine: Engine, outputs: dict[str, list] | None = None) -> dict[str, list]:
    outputs = {} if outputs is None else outputs
    while engine.num_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_a_second_request_does_not_compute_the_prefix_again(engine: Engine) -> None:
    before = engine.stats()
    first = engine.generate(prompt(1, 100), GREEDY)[0]
    second = engine.generate([*prompt(1, 100)[:90], *prompt(2, 9)], GREEDY)[0]
    after = engine.stats()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 90)
    assert after.prefilled_tokens - before.prefilled_tokens == 100 + 9
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 90
    assert_empty(engine)


def test_generated_tokens_are_shared_too(engine: Engine) -> None:
    turn = prompt(3, 20)
    answer = engine.generate(turn, GREEDY)[0]
    follow_up = [*turn, *answer.token_ids, *prompt(4, 5)]
    # 20 + 12 tokens, of which the last one's keys were never written.
    assert engine.generate(follow_up, GREEDY)[0].num_cached_tokens == 31


def test_requests_that_arrive_together_compute_a_common_prefix_once(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny)
    prompts = [[*prompt(5, 80), *prompt(100 + i, 8)] for i in range(8)]
    answers = engine.generate(prompts, GREEDY)
    assert engine.stats().prefilled_tokens == 80 + 8 * 8
    assert [a.num_cached_tokens for a in answers] == [0] + [80] * 7
    assert [a.token_ids for a in answers] == alone(tiny, prompts)
    assert_empty(engine)


def test_followers_go_on_when_their_leader_is_cancelled(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny)
    prompts = [[*prompt(6, 160), *prompt(200 + i, 8)] for i in range(3)]
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    engine.step()
    assert engine.stats().num_running == 1
    assert engine.cancel(ids[0])
    outputs = drain(engine)
    tokens = [sum((o.token_ids for o in outputs[i]), ()) for i in ids[1:]]
    assert tokens == alone(tiny, prompts[1:])
    assert_empty(engine)


def test_a_salt_keeps_tenants_apart(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny)
    cached = []
    for salt in ("", "a", "b", "a", ""):
        *_, last = engine.stream(prompt(7, 40), GREEDY, cache_salt=salt)
        cached.append(last.num_cached_tokens)
    assert cached == [0, 0, 0, 39, 39]


def test_without_prefix_caching_nothing_is_kept(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, enable_prefix_caching=False)
    for _ in range(2):
        assert engine.generate(prompt(8, 40), GREEDY)[0].num_cached_tokens == 0
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.slow
def test_preemption_changes_no_token_and_always_ends(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [prompt(300 + i, 30 + 7 * i) for i in range(5)]
    answers = engine.generate(prompts, params)
    assert [a.token_ids for a in answers] == alone(tiny, prompts, params)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    # Each prompt counts once, however often it was looked up again.
    assert stats.prefix_query_tokens == sum(map(len, prompts))
    assert_empty(engine)


def test_a_request_as_large_as_the_pool_is_served(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL)
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    answer = engine.generate(prompt(9, 168), params)[0]  # 192 slots, and one token never written
    assert len(answer.token_ids) == 25
    assert_empty(engine)


@pytest.mark.slow
def test_two_hundred_requests_a_third_cancelled_leak_nothing(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL)
    rng = random.Random(0)
    prefixes = [prompt(400 + i, 40) for i in range(4)]
    live: list[str] = []
    made = cancelled = 0
    while made < 200 or engine.num_unfinished:
        while made < 200 and len(live) < 14:
            tokens = [
                *rng.choice(prefixes)[: rng.randint(1, 40)],
                *prompt(made, rng.randint(1, 30)),
            ]
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 40), seed=made
            )
            live.append(engine.add_request(tokens, params))
            made += 1
        if rng.random() < 0.35 and live and cancelled * 3 < made:
            cancelled += engine.cancel(rng.choice(live))
        finished = {o.request_id for o in engine.step() if o.finished}
        live = [i for i in live if i not in finished and i in engine._requests]
        engine.check_invariants()
    stats = engine.stats()
    assert cancelled >= 60 and stats.num_cancelled == cancelled
    assert stats.num_finished == 200 - cancelled
    assert_empty(engine)


def test_a_seed_gives_the_same_text_in_any_batch(tiny: LoadedModel) -> None:
    params = [
        SamplingParams(
            temperature=0.8 + 0.1 * i, top_k=50 * i, top_p=1 - 0.05 * i, seed=i, max_tokens=10
        )
        for i in range(6)
    ]
    prompts = [prompt(500 + i, 10 + i) for i in range(6)]
    together = [a.token_ids for a in tiny_engine(tiny).generate(prompts, params)]
    engine = tiny_engine(tiny)
    apart = [engine.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert together == apart
    other = engine.generate(prompts[1], SamplingParams(temperature=0.9, seed=99, max_tokens=10))
    assert other[0].token_ids != together[1]


@pytest.mark.slow
def test_the_number_of_programs_is_bounded_and_warm_up_makes_them_all(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, num_speculative_tokens=2, max_speculative_seqs=2)
    seen: list[tuple[int, int, str]] = []
    count = engine.warmup(lambda *args: seen.append(args))
    # Steps of 16 and 32 tokens; loops of 1, 2, 4 sequences, speculative ones of 1 and 2; eight of
    # the block manager and two that copy.
    assert count == engine.num_programs == 2 + 3 + 2 + 10
    assert seen[-1][:2] == (count, count) and len(seen) == count + 1
    rng = random.Random(1)
    for i in range(30):
        engine.add_request(
            prompt(i, rng.randint(1, 200)),
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                top_k=rng.choice([0, 5]),
                max_tokens=rng.randint(1, 30),
                stop_token_ids=tuple(range(rng.randint(0, 12))),
            ),
            cache_salt=rng.choice(["", "x"]),
        )
    drain(engine)
    assert engine.num_programs == count
    assert_empty(engine)


def test_the_cache_is_donated(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny)
    runner = engine._runner
    before = [*runner._kv_cache, runner._tables.block_ids, runner._state.pool.ref_count]
    engine.generate(prompt(1, 20), GREEDY)
    assert all(array.is_deleted() for array in before)


def test_stop_tokens_and_stop_strings_end_a_text(tiny: LoadedModel, engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    whole = engine.generate(prompt(10, 20), params)[0]
    assert whole.finish_reason == "length"
    token = next(t for t in whole.token_ids if whole.token_ids.index(t) > 3)
    at = whole.token_ids.index(token)
    stopped = engine.generate(
        prompt(10, 20),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=(token,)),
    )[0]
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", whole.token_ids[: at + 1])
    stop = whole.text[len(whole.text) // 2 :][:4]
    cut = engine.generate(
        prompt(10, 20), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=(stop,))
    )[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    # More stop tokens than the device checks: the host catches the rest.
    many = (*range(20), token)
    wanted = min(whole.token_ids.index(t) for t in many if t in whole.token_ids)
    late = engine.generate(
        prompt(10, 20),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=many),
    )[0]
    assert late.token_ids == whole.token_ids[: wanted + 1]


def test_a_stream_is_the_whole_text_in_pieces(engine: Engine) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)
    pieces = list(engine.stream(prompt(11, 20), params))
    whole = engine.generate(prompt(11, 20), params)[0]
    assert "".join(p.text for p in pieces) == whole.text
    assert sum((p.token_ids for p in pieces), ()) == whole.token_ids
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]


def test_leaving_a_stream_gives_back_its_blocks(engine: Engine) -> None:
    stream = engine.stream(prompt(12, 60), SamplingParams(temperature=0, max_tokens=100))
    next(stream)
    assert engine.stats().num_active_blocks > 0
    stream.close()
    assert_empty(engine)


def test_streams_read_in_turns_lose_nothing(engine: Engine) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 15)]
    whole = [engine.generate(prompt(20 + i, 20), params[i])[0] for i in range(2)]
    streams = [engine.stream(prompt(20 + i, 20), params[i]) for i in range(2)]
    parts = [[next(stream)] for stream in streams]
    engine.generate(prompt(22, 20), params[1])  # both streams advance meanwhile
    for part, stream, want in zip(parts, streams, whole, strict=True):
        part.extend(stream)
        assert "".join(p.text for p in part) == want.text
        assert part[-1].finish_reason == "length"
    assert_empty(engine)


def test_an_interrupt_while_a_request_is_admitted_leaks_nothing(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(tiny)
    admit = engine._runner.admit

    def interrupted(request, seat):
        admit(request, seat)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._runner, "admit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt(1, 20), GREEDY)
    assert_empty(engine)
    monkeypatch.undo()
    assert len(engine.generate(prompt(1, 20), GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize("params", [{"temperature": 1e-38}, {"temperature": 1.0, "top_p": 1e-46}])
def test_the_smallest_values_take_the_likeliest_token(engine: Engine, params: dict) -> None:
    extreme = SamplingParams(max_tokens=12, ignore_eos=True, **params)
    want = engine.generate(prompt(23, 20), GREEDY)[0].token_ids
    assert engine.generate(prompt(23, 20), extreme)[0].token_ids == want


@pytest.mark.parametrize("token", [49152, 1 << 31, 1 << 80])
def test_a_stop_token_outside_the_vocabulary_is_refused(engine: Engine, token: int) -> None:
    with pytest.raises(InvalidRequest, match=str(token)) as caught:
        engine.add_request([1], SamplingParams(stop_token_ids=(token,)))
    assert caught.value.param == "stop_token_ids"
    assert_empty(engine)


BAD_PROMPTS = {
    "empty": ([], "prompt", "empty"),
    "empty-text": ("", "prompt", "empty"),
    "negative": ([1, -1], "prompt", "-1"),
    "outside": ([49152], "prompt", "49152"),
    "not-a-token": ([1.5], "prompt", "1.5"),
    "boolean": ([True], "prompt", "True"),
    "too-long": ([1] * 512, "prompt", "512"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_anything_changes(engine: Engine, name: str) -> None:
    tokens, param, message = BAD_PROMPTS[name]
    with pytest.raises(InvalidRequest, match=message) as caught:
        engine.add_request(tokens, GREEDY)
    assert caught.value.param == param
    assert_empty(engine)


def test_what_can_never_fit_is_refused_at_once(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL)
    with pytest.raises(InvalidRequest, match="at most 25 fit") as caught:
        engine.add_request(prompt(1, 168), SamplingParams(max_tokens=26))
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="never fit"):
        engine.add_request(prompt(1, 193), SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_request([1], GREEDY, request_id="a")
        engine.add_request([1], GREEDY, request_id="a")
    engine.cancel("a")
    assert_empty(engine)


def test_whoever_was_preempted_computes_nothing_again_that_stayed(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, async_scheduling=False, max_decode_steps=4)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = engine.generate(prompt(92, 100), long)[0].token_ids
    engine.reset_cache()
    request_id = engine.add_request(prompt(92, 100), long)
    tokens: list[int] = []
    for pause in range(3):
        while len(tokens) < 10 * (1 + pause):
            tokens += [token for output in engine.step() for token in output.token_ids]
        before = engine.stats().prefilled_tokens
        engine._preempt(engine._requests[request_id])
        tokens += [token for output in engine.step() for token in output.token_ids]
        # The newest token was never computed; nothing else is.
        assert engine.stats().prefilled_tokens - before <= 1
    tokens += [token for output in drain(engine)[request_id] for token in output.token_ids]
    assert tuple(tokens) == wanted and engine.stats().num_preemptions == 3
    assert_empty(engine)


BAD_PARAMS = [
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 1e9),
    ("top_k", -2),
    ("top_k", 1 << 40),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", float("nan")),
    ("min_p", -0.5),
    ("min_p", 2.0),
    ("seed", 1 << 70),
    ("seed", 1.5),
    ("stop", ("",)),
    ("stop", "text"),
    ("stop_token_ids", (-1,)),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", float("inf")),
    ("presence_penalty", 2.1),
    ("frequency_penalty", float("nan")),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1.0: 1}),
    ("logit_bias", [1]),
    ("logit_bias", dict.fromkeys(range(301), 1.0)),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt_logprobs", 21),
]


@pytest.mark.parametrize(("param", "value"), BAD_PARAMS)
def test_bad_sampling_parameters_are_named(param: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        SamplingParams(**{param: value})  # pyright: ignore[reportArgumentType]
    assert caught.value.param == param


BAD_CONFIGS = [
    ({"block_size": 0}, "block_size=0"),
    ({"num_blocks": 1}, "num_blocks=1"),
    ({"kv_cache_gib": 0.0}, "kv_cache_gib=0.0"),
    ({"kv_cache_gib": 1e-9}, "holds 0 blocks"),
    ({"kv_cache_dtype": "int4"}, "int4"),
    ({"max_model_len": 513}, "max_model_len=513"),
    ({"scheduling_policy": "sjf"}, "sjf"),
    ({"max_setbacks": 0}, "max_setbacks=0"),
    ({"max_waiting": 0}, "max_waiting=0"),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens=32"),
    ({"block_size": 16.5}, "block_size=16.5 must be an integer"),
    ({"max_num_seqs": True}, "max_num_seqs=True must be an integer"),
    ({"num_blocks": "many"}, "num_blocks='many' must be an integer"),
    ({"decode_slice_ms": float("inf")}, "decode_slice_ms=inf must be a finite number"),
    ({"kv_cache_gib": float("nan")}, "kv_cache_gib=nan must be a finite number"),
    ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
    ({"deterministic": 1}, "deterministic=1 must be True or False"),
    ({"disk_cache_dir": None}, "disk_cache_dir=None must be a string"),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_a_bad_configuration_is_named(tiny: LoadedModel, config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny, EngineConfig(compilation_cache_dir="", **config))


def test_numbers_of_other_libraries_and_paths_become_plain_ones(tmp_path: Path) -> None:
    values: dict[str, Any] = {"num_blocks": np.int64(64), "decode_slice_ms": np.float32(50)}
    given = EngineConfig(**values, kv_cache_gib=1, disk_cache_dir=tmp_path)  # pyright: ignore
    plain = EngineConfig(
        num_blocks=64, kv_cache_gib=1.0, decode_slice_ms=50.0, disk_cache_dir=str(tmp_path)
    )
    assert repr(given) == repr(plain) and given == plain


def test_what_is_refused_leaves_no_namespace_and_a_long_salt_is_not_kept(engine: Engine) -> None:
    namespaces = engine._intake.namespaces
    before = len(namespaces._ids)
    for bad in (SamplingParams(stop_token_ids=(1 << 20,)), SamplingParams(max_tokens=1 << 20)):
        with pytest.raises(InvalidRequest):
            engine.add_request([1, 2], bad, cache_salt="refused")
    assert len(namespaces._ids) == before
    long = "salt" * 1000
    hits = []
    for salt in (long, long + "!", long):
        *_, last = engine.stream(prompt(91, 40), GREEDY, cache_salt=salt)
        hits.append(last.num_cached_tokens > 0)
    assert hits == [False, False, True]
    key = engine._intake.namespace_key(long, None)
    assert len(key.salt) < 100 and key.salt != engine._intake.namespace_key(key.salt, None).salt


def test_one_bad_prompt_of_several_starts_none(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        engine.generate([prompt(1, 10), [-1]], GREEDY)
    assert_empty(engine)
    with pytest.raises(ValueError, match=r"2 sampling params, .* for 1 prompts"):
        engine.generate([prompt(1, 10)], [GREEDY, GREEDY])


def test_a_miss_is_explained(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny)
    first = prompt(70, 40)
    assert engine.explain(first).reason == "new"
    engine.generate(first, GREEDY)
    assert engine.explain(first).reason == "whole"
    assert engine.explain(first, cache_salt="b").reason == "namespace"
    told = engine.explain([*first[:21], first[21] ^ 1, 5])
    assert (told.reason, told.num_cached_tokens, told.cached_token) == ("diverged", 21, first[21])


def test_an_eviction_is_explained_by_the_request_it_made_room_for(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL, eviction_policy="lru")
    first = prompt(71, 40)
    engine.generate(first, GREEDY)
    one = SamplingParams(temperature=0, max_tokens=1)
    request_id = engine.add_request(prompt(72, 165), one, request_id="pushy")
    drain(engine)
    told = engine.explain(first)
    assert told.reason == "evicted" and told.num_evicted_tokens > 0
    assert told.evicted_for == request_id and "pushy" in str(told)
    assert told.evicted_at is not None and told.evicted_at >= 0


@pytest.mark.slow
def test_a_pinned_prompt_outlives_others_and_the_budget_is_kept(tiny: LoadedModel) -> None:
    # Room for the longest request, 16 blocks, and eight blocks more.
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL, max_model_len=128, eviction_policy="lru")
    kept = prompt(73, 40)
    assert engine.pin(kept) == 0
    engine.generate(kept, GREEDY)
    assert engine.pin(kept) == 40
    longer = [*kept, *prompt(74, 40)]
    engine.generate(longer, GREEDY)
    with pytest.raises(PinBudgetExceeded, match="more than 8 blocks"):
        engine.pin(longer)
    for i in range(4):
        engine.generate(prompt(75 + i, 100), GREEDY)
    assert engine.explain(kept).num_cached_tokens == 39
    engine.unpin(kept)
    for i in range(4):
        engine.generate(prompt(85 + i, 100), GREEDY)
    assert engine.explain(kept).num_cached_tokens == 0
    with pytest.raises(InvalidRequest, match="must be positive"):
        engine.pin(kept, ttl_seconds=0)
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_tokens(tiny: LoadedModel, policy: str) -> None:
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL, eviction_policy=policy)
    prompts = [[*prompt(90, 30), *prompt(91 + i % 3, 9)] for i in range(6)]
    assert [engine.generate(p, GREEDY)[0].token_ids for p in prompts] == alone(tiny, prompts)
    engine.check_invariants()
