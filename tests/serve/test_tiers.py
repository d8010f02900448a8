"""Blocks that leave the device come back from host memory and from disk: the same bits, sooner."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from octavo.models import LoadedModel
from octavo.paged import PinBudgetExceeded
from octavo.serve import BeamSearchParams, Completion, Engine, EngineConfig, SamplingParams
from octavo.serve.api import create_app
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.metrics import ServerMetrics
from octavo.serve.staging import Staging

from .test_lifecycle import other_weights
from .tiered import (
    BLOCK_GIB,
    GREEDY,
    evict,
    from_tiers,
    kept,
    let_threads_read,
    one,
    prompt,
    stack_of,
    tiered,
)
from .tiny import tiny_adapter


@pytest.fixture
def engine(tiered_engine: Engine) -> Engine:
    return tiered_engine


@pytest.mark.slow
def test_what_was_evicted_comes_back_from_host_memory_with_the_same_bits(engine: Engine) -> None:
    first, before = one(engine, prompt(0)), engine.stats()
    bits = kept(engine, prompt(0))
    assert len(bits) == 12
    evict(engine)
    assert len(kept(engine, prompt(0))) == 0
    assert engine.explain(prompt(0)).num_tier_tokens == 96
    assert str(engine.explain(prompt(0))).endswith("; the next 96 are in tiers below the device")
    again, after = one(engine, prompt(0)), engine.stats()
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 96)
    assert again.token_ids == first.token_ids
    np.testing.assert_array_equal(kept(engine, prompt(0)), bits)
    assert after.tiers["host"].hits - before.tiers["host"].hits == 12
    assert after.tiers["disk"].hits == before.tiers["disk"].hits
    assert after.external_hit_tokens - before.external_hit_tokens == 96
    # Restored blocks are blocks like all others: the next one finds them on the device.
    third = one(engine, prompt(0))
    assert third.num_cached_tokens == 99 and third.token_ids == first.token_ids
    assert from_tiers(engine)["host"] == after.tiers["host"].hits
    assert engine.explain(prompt(0)).num_tier_tokens == 0


def test_what_came_back_is_not_the_next_to_go(tiny: LoadedModel) -> None:
    engine = tiered(tiny, host=60)
    one(engine, prompt(0))
    evict(engine, seed=1000)  # 36 blocks, and there is room for 60
    assert one(engine, prompt(0)).num_cached_tokens == 96
    evict(engine, seed=2000)
    assert one(engine, prompt(0)).num_cached_tokens == 96
    engine.close()


def test_generated_tokens_come_back_too(engine: Engine, cold) -> None:
    first = one(
        engine, prompt(0, 30), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    )
    evict(engine)
    longer = [*prompt(0, 30), *first.token_ids, 5, 6, 7]
    again = one(engine, longer)
    assert again.num_cached_tokens == 64  # the last one's keys and values were never computed
    assert again.token_ids == cold(longer).token_ids


def test_another_engine_finds_the_blocks_on_disk(tiny: LoadedModel, engine: Engine) -> None:
    whole = one(engine, prompt(0))
    bits = kept(engine, prompt(0))
    stack_of(engine).flush()
    second = tiered(tiny, host=4, disk=Path(engine.config.disk_cache_dir))
    again = one(second, prompt(0))
    assert (again.num_cached_tokens, again.token_ids) == (96, whole.token_ids)
    np.testing.assert_array_equal(kept(second, prompt(0)), bits)
    assert from_tiers(second) == {"host": 0, "disk": 12}
    assert second.stats().tiers["host"].num_blocks == 4
    second.check_invariants()
    second.close()


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{"kv_cache_dtype": "bfloat16"}, {"deterministic": False}])
def test_other_caches_come_back_and_find_nothing_of_one_another(
    tiny: LoadedModel, engine: Engine, setting: dict
) -> None:
    one(engine, prompt(0))
    stack_of(engine).flush()
    other = tiered(tiny, host=100, disk=Path(engine.config.disk_cache_dir), **setting)
    first = one(other, prompt(0))
    assert first.num_cached_tokens == 0  # those on disk are not the same bits
    bits = kept(other, prompt(0))
    evict(other)
    again = one(other, prompt(0))
    assert again.num_cached_tokens == 96
    np.testing.assert_array_equal(kept(other, prompt(0)), bits)
    assert again.token_ids == first.token_ids
    other.check_invariants()
    other.close()


def test_pins_over_the_budget_of_the_device_are_kept_below(tiny: LoadedModel, cold) -> None:
    engine = tiered(tiny, host=60, max_pinned_fraction=0.2)  # 3 blocks
    one(engine, prompt(5, 48))
    one(engine, prompt(0))
    assert engine.pin(prompt(0)) == 96  # more than the device's budget
    stats = engine.stats()
    assert stats.tiers["host"].pinned == 12
    for seed in range(1000, 1016, 2):  # far more than the host has room for
        evict(engine, seed)
    assert len(kept(engine, prompt(0))) == 0
    assert one(engine, prompt(0)).num_cached_tokens == 96
    assert one(engine, prompt(5, 48)).num_cached_tokens == 0
    engine.reset_cache(keep_pinned=True)
    answer = one(engine, prompt(0))
    assert answer.num_cached_tokens == 96
    assert answer.token_ids == cold(prompt(0)).token_ids
    # Half of the host's blocks are all that can be pinned there.
    for seed in (7, 9, 8):
        one(engine, prompt(seed))
    assert engine.pin(prompt(7)) == 96
    with pytest.raises(PinBudgetExceeded, match="more than 3 blocks"):
        engine.pin(prompt(8))
    engine.unpin(prompt(7))
    assert engine.pin(prompt(8)) == 96
    engine.unpin(prompt(0))
    engine.unpin(prompt(8))
    assert engine.stats().tiers["host"].pinned == 0
    engine.check_invariants()
    engine.close()


def test_blocks_pass_through_page_locked_memory_where_a_device_has_it(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, cold
) -> None:
    device = jax.devices()[0]
    assert Staging.of(device).host is None  # the device is the host
    here = SingleDeviceSharding(device)
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    monkeypatch.setattr(Staging, "of", lambda _: Staging(host=pinned, device=here, is_host=False))
    engine = tiered(tiny, host=100)
    found = engine._runner.tiers
    assert found is not None
    kinds = []
    save, load = found.stack.save, found._load
    monkeypatch.setattr(
        found.stack,
        "save",
        lambda keys, tokens, packed: (
            kinds.append(packed.sharding.memory_kind),
            save(keys, tokens, packed),
        ),
    )

    def loaded(*args):
        own = load(*args)
        assert isinstance(own.blocks, jax.Array)
        kinds.append(own.blocks.sharding.memory_kind)
        return own

    monkeypatch.setattr(found, "_load", loaded)
    one(engine, prompt(0))
    bits = kept(engine, prompt(0))
    evict(engine)
    answer = one(engine, prompt(0))
    assert (answer.num_cached_tokens, answer.token_ids) == (96, cold(prompt(0)).token_ids)
    np.testing.assert_array_equal(kept(engine, prompt(0)), bits)
    assert set(kinds) == {"pinned_host"} and len(kinds) > 2
    assert engine._runner._kv_cache[0].sharding.memory_kind == here.memory_kind
    engine.close()


def test_loads_use_the_same_memory_again(
    engine: Engine, cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine._runner.tiers
    assert found is not None
    let_threads_read(engine, monkeypatch)
    one(engine, prompt(0))
    used, num_loads = set(), 0
    load = found._load

    def counted(*args):
        nonlocal num_loads
        num_loads += 1
        return load(*args)

    monkeypatch.setattr(found, "_load", counted)
    for _ in range(8):
        evict(engine)
        assert one(engine, prompt(0)).token_ids == cold(prompt(0)).token_ids
        used |= {buffer.memory.ctypes.data for buffer in found._buffers._free}
    assert num_loads >= 8 and 1 <= len(used) <= num_loads // 8 + 1


def test_no_tier_serves_across_salts(engine: Engine) -> None:
    def run(salt: str) -> int:
        (answer,) = engine.collect([engine.add_request(prompt(0), GREEDY, cache_salt=salt)])
        evict(engine)
        return answer.num_cached_tokens

    assert [run("a"), run("b"), run(""), run("a"), run("b"), run("")] == [0, 0, 0, 96, 96, 96]
    stack_of(engine).clear(["host"])  # from disk
    assert [run("c"), run("a"), run("ab"), run("b")] == [0, 96, 0, 96]


@pytest.mark.slow
def test_adapters_find_only_their_own_blocks(tiny: LoadedModel) -> None:
    engine = tiered(tiny, host=200, max_loras=2, max_lora_rank=4)
    for seed, name in enumerate(("poet", "sql")):
        engine.load_adapter(name, tiny_adapter(tiny.config, seed))

    def run(name: str | None) -> Completion:
        (answer,) = engine.generate([prompt(0)], GREEDY, adapter=name)
        evict(engine)
        return answer

    first = {name: run(name) for name in (None, "poet", "sql")}
    assert [answer.num_cached_tokens for answer in first.values()] == [0, 0, 0]
    for name, answer in first.items():
        again = run(name)
        assert (again.num_cached_tokens, again.token_ids) == (96, answer.token_ids)
    # The same name for other weights.
    engine.load_adapter("poet", tiny_adapter(tiny.config, 7))
    assert run("poet").num_cached_tokens == 0
    engine.close()


def test_the_rest_is_computed_where_the_tiers_end(engine: Engine, cold) -> None:
    one(engine, prompt(0))
    evict(engine)
    other = [*prompt(0)[:61], *prompt(7, 50)]
    answer = one(engine, other)
    assert answer.num_cached_tokens == 56
    assert answer.token_ids == cold(other).token_ids


def test_a_part_on_the_device_and_a_part_below_are_put_together(engine: Engine, cold) -> None:
    one(engine, prompt(0))
    evict(engine)
    one(engine, prompt(0)[:36])  # back on the device: 4 blocks, and a part of the next
    before = from_tiers(engine)
    answer = one(engine, prompt(0))
    assert answer.num_cached_tokens == 96
    assert from_tiers(engine)["host"] - before["host"] == 8
    assert answer.token_ids == cold(prompt(0)).token_ids


def test_http_and_metrics_show_the_tiers_and_a_reset_clears_them(engine: Engine) -> None:
    one(engine, prompt(0))
    evict(engine)
    one(engine, prompt(0))
    stack_of(engine).flush()
    page = ServerMetrics("tiny").render(engine.stats())[0].decode()
    for line in (
        r"octavo:tier_hits_total\{model_name=\"tiny\",tier=\"host\"\} [1-9]",
        r"octavo:tier_blocks\{model_name=\"tiny\",tier=\"disk\"\} [1-9]",
        r"octavo:tier_errors_total\{model_name=\"tiny\",tier=\"disk\"\} ",
        r"vllm:external_prefix_cache_hits_total\{model_name=\"tiny\"\} [1-9]",
    ):
        assert re.search(line, page), page

    async def ask() -> None:
        with AsyncEngine(engine) as async_engine:
            app = create_app(async_engine, cache_control=True)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
                for query in ("", "?disk=true"):
                    assert (await http.post(f"/reset_prefix_cache{query}")).status_code == 200
                    told.append((await http.post("/cache/explain", json=body)).json())

    told, body = [], {"prompt": [prompt(0)]}
    asyncio.run(ask())
    assert [explanation["num_tier_tokens"] for explanation in told] == [96, 0]
    assert "in tiers below the device" in told[0]["message"]


def test_a_reset_clears_host_memory_and_the_disk_if_asked(engine: Engine) -> None:
    one(engine, prompt(0))
    stack_of(engine).flush()
    engine.reset_cache()
    stats = engine.stats().tiers
    assert (stats["host"].num_blocks, stats["disk"].num_blocks) == (0, 13)
    assert one(engine, prompt(0)).num_cached_tokens == 96
    engine.reset_cache(disk=True)
    assert engine.stats().tiers["disk"].num_blocks == 0
    assert one(engine, prompt(0)).num_cached_tokens == 0


def test_other_weights_with_the_same_fingerprint_find_nothing(
    tiny: LoadedModel, engine: Engine
) -> None:
    old = one(engine, prompt(0))
    for _ in range(2):
        engine.load_weights(other_weights(tiny, tiny.fingerprint))
        new = one(engine, prompt(0))
        assert new.num_cached_tokens == 0 and new.token_ids != old.token_ids
    evict(engine)
    assert one(engine, prompt(0)).num_cached_tokens == 96  # its own
    engine.load_weights(other_weights(tiny, "other"))
    assert one(engine, prompt(0)).num_cached_tokens == 0
    engine.load_weights(tiny)
    again = one(engine, prompt(0))
    assert (again.num_cached_tokens, again.token_ids) == (0, old.token_ids)


@pytest.mark.slow
def test_samples_and_beams_come_back_and_are_what_they_are_without_tiers(
    engine: Engine, unshared: Engine
) -> None:
    samples = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    asks: list[Callable[[Engine], list[Completion]]] = [
        lambda engine: engine.generate([prompt(0)], samples),
        lambda engine: engine.beam_search(prompt(0), beams),
    ]
    for ask in asks:
        theirs = [answer.token_ids for answer in ask(unshared)]
        for cached in (0, 96):
            mine = ask(engine)
            assert [answer.token_ids for answer in mine] == theirs
            assert {answer.num_cached_tokens for answer in mine} == {cached}
            evict(engine)
        engine.reset_cache(disk=True)


def test_all_programs_are_compiled_ahead(tiny: LoadedModel) -> None:
    engine = tiered(tiny, host=100)
    count = engine.warmup()
    assert count == engine.num_programs == 2 + 3 + 10 + 9
    one(engine, prompt(0))
    evict(engine)
    assert one(engine, prompt(0)).num_cached_tokens == 96
    assert engine.num_programs == count
    assert {r.why for r in engine.explain_compile() if "pack" in r.name} >= {
        "blocks together, on their way to lower tiers",
        "blocks from there, where they belong",
    }


def test_threads_end_with_the_engine_closed_or_not(tiny: LoadedModel, tmp_path: Path) -> None:
    def new_threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("octavo-tier")} - before

    before: set[threading.Thread] = set()
    before = new_threads()
    engine = tiered(tiny, host=100, disk=tmp_path)
    one(engine, prompt(0))
    evict(engine)
    stack_of(engine).clear(["host"])
    one(engine, prompt(0))
    assert len(new_threads()) >= 3
    engine.close()
    engine.close()
    assert not new_threads()
    evict(engine)
    assert one(engine, prompt(0)).num_cached_tokens == 0  # it goes on, without the tiers
    engine = tiered(tiny, disk=tmp_path)
    assert one(engine, prompt(0)).num_cached_tokens == 96
    del engine
    gc.collect()
    assert not new_threads()


def test_a_budget_of_zero_is_no_tier(tiny: LoadedModel, tmp_path: Path) -> None:
    engine = tiered(tiny, disk=tmp_path, disk_cache_gib=0)
    assert engine._runner.tiers is None and engine.stats().tiers == {}
    assert list(tmp_path.iterdir()) == []
    engine.reset_cache(disk=True)
    engine.close()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"host_cache_gib": -1}, "host_cache_gib=-1.0 must be at least 0"),
        ({"disk_cache_gib": float("nan")}, "disk_cache_gib=nan must be a finite number"),
        ({"host_cache_gib": 1, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"disk_cache_dir": "x", "enable_prefix_caching": False}, "enable_prefix_caching"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        EngineConfig(**config)


def test_a_budget_too_small_for_a_block_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match="no block"):
        tiered(tiny, host_cache_gib=BLOCK_GIB / 2)
