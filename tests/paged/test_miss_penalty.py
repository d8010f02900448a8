"""One model on one machine: load or recompute, break-even points, devices, and what to pin."""

import random
from dataclasses import replace

import numpy as np
import pytest

from octavo.paged.cost_model import (
    HARDWARE,
    MODEL_SHAPES,
    TIERS,
    CostModel,
    fit_hits,
    fit_prefill,
    fit_restore,
    kv_bytes,
    miss_penalty,
)
from octavo.pallas_kernels import CHIPS

LONG = 131_072
SHAPE, H200 = MODEL_SHAPES["llama-3.1-70b"], HARDWARE["h200"]
COSTS = CostModel(SHAPE, H200)
FLOPS, MEMORY, LINK = 0.45 * 989e12, 0.8 * 4.8e12, 0.85 * 64e9  # an H200 as it is reached


def test_a_miss_a_hit_and_restores_take_what_a_hand_calculation_says():
    penalty = miss_penalty(COSTS, LONG, 32)
    total = LONG + 32
    layers = 80 * (2 * 8192 * (64 + 8) * 128 + 3 * 8192 * 28672)
    head = 128_256 * 8192
    flops = 2 * layers * total + 80 * 2 * 64 * 128 * total**2 + 2 * head
    miss, hit = penalty.by_name["miss"], penalty.by_name["hit"]
    assert miss.flops == flops
    assert miss.seconds == pytest.approx(flops / FLOPS) == pytest.approx(90.95, abs=0.01)
    attention = 4 * 80 * 64 * 128 * 32 * (total - 32 / 2)
    assert hit.flops == 2 * layers * 32 + attention + 2 * head
    # Matrices wait for the weights, attention for its FLOPs: 36.2 and 24.7 ms.
    seconds = 2 * (layers + head) / MEMORY + attention / FLOPS
    assert hit.seconds == pytest.approx(seconds) == pytest.approx(0.06091, abs=1e-5)
    assert hit.memory_bytes == 2 * (layers + head) + 327_680 * (total + 32)
    for tier, rate in (("host", LINK), ("disk", 0.8 * 6.5e9), ("remote", 0.8 * 12.5e9)):
        restored = penalty.by_name[tier]
        assert restored.moved_bytes == 327_680 * LONG == 42_949_672_960
        assert restored.seconds == pytest.approx(42_949_672_960 / rate + seconds)
        assert restored.bound_by == tier
        assert penalty.saved_by_pin[tier] == pytest.approx(42_949_672_960 / rate)
    assert (miss.bound_by, hit.bound_by) == ("compute", "memory")
    assert penalty.saved_by_pin["miss"] == pytest.approx(miss.seconds - hit.seconds)


def test_a_stretch_costs_the_same_in_parts_and_at_once():
    whole = COSTS.seconds_to_recompute(0, LONG)
    parts = [COSTS.seconds_to_recompute(at, at + 8192) for at in range(0, LONG, 8192)]
    assert sum(parts) == pytest.approx(whole)
    assert parts == sorted(parts)
    starts = np.arange(0, LONG, 8192)
    np.testing.assert_allclose(COSTS.seconds_to_recompute(starts, starts + 8192), parts)
    assert type(whole) is float
    assert COSTS.seconds_to_recompute(77, 77) == 0


def test_restoring_takes_bytes_over_the_slower_way():
    slow = replace(H200, peak_link_bytes=1e9)
    for tier in TIERS:
        assert CostModel(SHAPE, slow).seconds_to_restore(tier, 1000) == pytest.approx(
            327_680_000 / 0.85e9
        )
    assert COSTS.seconds_to_restore("disk", np.array([0, 10])).tolist() == [
        0,
        pytest.approx(3_276_800 / 5.2e9),
    ]
    assert COSTS.seconds_to_store("disk", 10) == pytest.approx(3_276_800 / (0.8 * 3.5e9))
    assert COSTS.seconds_to_store("host", 10) == COSTS.seconds_to_restore("host", 10)


def test_a_tier_that_is_not_there_is_refused_by_name():
    bare = replace(H200, peak_disk_read_bytes=None, peak_remote_bytes=None)
    costs = CostModel(SHAPE, bare)
    assert costs.tiers == ("host",)
    assert {outcome.name for outcome in miss_penalty(costs, 100).outcomes} == {
        *("miss", "host", "hit", "decode")
    }
    for tier in ("disk", "remote", "tape"):
        with pytest.raises(ValueError, match=f"tier='{tier}' must be one of host"):
            costs.seconds_to_restore(tier, 1)


def test_devices_share_the_work_and_one_disk():
    eight = CostModel(SHAPE, H200, 8)
    assert eight.machine.memory_bytes == 8 * 141e9
    assert eight.seconds_to_recompute(0, LONG) == pytest.approx(
        COSTS.seconds_to_recompute(0, LONG) / 8
    )
    for tier, gain in (("host", 8), ("disk", 1), ("remote", 1)):
        assert eight.seconds_to_restore(tier, LONG) * gain == pytest.approx(
            COSTS.seconds_to_restore(tier, LONG)
        )
    # Sixteen devices hold each of the 8 KV heads twice, and each must receive its own.
    sixteen = CostModel(SHAPE, H200, 16)
    assert sixteen.seconds_to_restore("host", LONG) == pytest.approx(
        eight.seconds_to_restore("host", LONG)
    )
    assert sixteen.seconds_to_restore("disk", LONG) == COSTS.seconds_to_restore("disk", LONG)
    assert miss_penalty(sixteen, LONG).fit.prefix_bytes == 2 * kv_bytes(SHAPE, LONG)


@pytest.mark.parametrize(("name", "devices"), [("llama-3.1-8b", 1), ("llama-3.1-70b", 8)])
@pytest.mark.parametrize("tier", TIERS)
def test_restoring_wins_from_the_break_even_length_on_and_not_before(name, devices, tier):
    costs = CostModel(MODEL_SHAPES[name], H200, devices)
    length = costs.break_even_length(tier, 32)
    assert length is not None and length > 1

    def wins(length):
        restored = costs.seconds_to_restore(tier, length)
        hit = costs.seconds_to_first_token(length, length + 32)
        return restored + hit <= costs.seconds_to_first_token(0, length + 32)

    assert wins(length) and not wins(length - 1)
    rng = random.Random(0)
    assert all(wins(int(length * 1.05 ** rng.uniform(1, 100))) for _ in range(50))
    assert not any(wins(rng.randrange(1, length)) for _ in range(50))


def test_the_break_even_length_of_a_slow_disk_is_that_of_the_formula():
    """Far above the ridge: 2 P n + 2 L N H ((n + t)² - t² - 2 n t), over FLOP/s, against bytes."""
    costs = CostModel(SHAPE, H200, 8)
    per_token = kv_bytes(SHAPE, 1) / (0.8 * 6.5e9) - 2 * SHAPE.num_params / (8 * FLOPS)
    expected = per_token * 8 * FLOPS / (2 * 80 * 64 * 128)
    assert costs.break_even_length("disk", 32) == pytest.approx(expected, rel=0.01)


def test_a_window_and_a_slow_link_never_break_even():
    windowed = replace(MODEL_SHAPES["mistral-7b-v0.3"], sliding_window=4096)
    costs = CostModel(windowed, replace(H200, peak_link_bytes=1e6))
    assert costs.break_even_length("host") is None


def test_a_link_of_the_break_even_bandwidth_is_as_fast_as_computing():
    needed = COSTS.break_even_bandwidth(5000, 32)
    exact = CostModel(SHAPE, replace(H200, peak_link_bytes=needed / 0.85))
    assert exact.seconds_to_restore("host", 5000) == pytest.approx(COSTS.seconds_saved(5000, 32))


def test_what_fits_is_counted_beside_the_weights():
    fit = miss_penalty(COSTS, LONG).fit
    assert not fit.fits and fit.num_prefixes == 0
    assert fit.needed_devices == 2  # 141 GB and 43 GB in 2 x 127 GB
    two = miss_penalty(CostModel(SHAPE, H200, 2), LONG).fit
    assert two.fits
    weights = 2 * (SHAPE.num_params + 2 * 128_256 * 8192)
    assert two.num_prefixes == int((0.9 * 282e9 - weights) / 42_949_672_960) == 2
    # 16.1 GB and 17.2 GB in 14.4 GB each; and what not even a device per head holds.
    small, large = MODEL_SHAPES["llama-3.1-8b"], MODEL_SHAPES["llama-3.1-405b"]
    assert miss_penalty(CostModel(small, HARDWARE["t4"]), LONG).fit.needed_devices == 4
    assert miss_penalty(CostModel(large, HARDWARE["t4"]), LONG).fit.needed_devices is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((LONG, 0), "num_new=0"),
        ((0, 32), "prefix_len=0"),
        ((1.5, 32), r"prefix_len=1\.5"),
    ],
)
def test_lengths_that_are_no_positive_integers_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        miss_penalty(COSTS, *arguments)


def test_a_model_of_costs_refuses_what_it_cannot_count():
    for arguments, words in (((3,), "num_devices=3"), ((1, 0), "chunk_size=0")):
        with pytest.raises(ValueError, match=words):
            CostModel(SHAPE, H200, *arguments)
    for span in ((5, 5), (6, 5), (-1, 5)):
        with pytest.raises(ValueError, match=f"num_cached={span[0]}"):
            COSTS.request_work(*span)


def with_shares(**shares):
    return replace(COSTS, hardware=replace(H200, efficiency=replace(H200.efficiency, **shares)))


def test_measured_prefills_tell_matrices_and_attention_apart():
    real = with_shares(matmul=0.7, attention=0.3)
    # The last one waits for the weights, and would tell of matrices that are slow.
    spans = [(0, 4096), (0, 32_768), (100_000, 101_024), (1000, 1008)]
    fitted = fit_prefill(COSTS, [(*span, real.seconds_to_recompute(*span)) for span in spans])
    assert fitted.hardware.efficiency.matmul == pytest.approx(0.7, rel=0.01)
    assert fitted.hardware.efficiency.attention == pytest.approx(0.3, rel=0.01)
    assert fitted.seconds_to_recompute(0, LONG) == pytest.approx(
        real.seconds_to_recompute(0, LONG), rel=0.01
    )


def test_prefills_too_alike_to_tell_leave_attention_as_it_was():
    real = with_shares(matmul=0.3)
    spans = [(0, 1024), (0, 2048)]
    noise = (1.02, 0.98)
    seconds = [real.seconds_to_recompute(*span) * k for span, k in zip(spans, noise, strict=True)]
    fitted = fit_prefill(COSTS, [(*s, t) for s, t in zip(spans, seconds, strict=True)])
    was = COSTS.hardware.efficiency.attention
    assert fitted.hardware.efficiency.attention == pytest.approx(was)
    assert fitted.hardware.efficiency.matmul == pytest.approx(0.3, rel=0.03)


def test_one_measured_prefill_is_predicted_exactly_afterwards():
    for span in ((0, 4096), (4000, 4001)):  # bound by FLOP/s, and by memory
        fitted = fit_prefill(COSTS, [(*span, 1.5)])
        assert fitted.seconds_to_recompute(*span) == pytest.approx(1.5)
    slow = replace(COSTS, hardware=replace(H200, dispatch_seconds=0.1))
    fitted = fit_prefill(slow, [(0, 1024, 1.5)])
    assert fitted.seconds_to_recompute(0, 1024) == pytest.approx(1.5)


def test_measured_hits_tell_what_a_step_takes_and_what_its_context_does():
    real = with_shares(context=0.05)
    real = replace(real, hardware=replace(real.hardware, dispatch_seconds=0.02))
    spans = [(n, n + 32) for n in (1024, 4096, 16_384)]
    fitted = fit_hits(COSTS, [(*span, real.seconds_to_recompute(*span)) for span in spans])
    assert fitted.hardware.efficiency.context == pytest.approx(0.05, rel=0.01)
    assert fitted.hardware.dispatch_seconds == pytest.approx(0.02, rel=0.01)
    for span in (*spans, (100_000, 100_032)):
        assert fitted.seconds_to_recompute(*span) == pytest.approx(
            real.seconds_to_recompute(*span), rel=0.01
        )
    for measured, words in (
        ([(10, 20, 1.0)], "two lengths"),
        ([(10, 20, 1.0), (10, 30, 2.0)], "two lengths"),
        ([(10, 20, 1.0), (100, 120, 1.0)], "took no longer"),
    ):
        with pytest.raises(ValueError, match=words):
            fit_hits(COSTS, measured)


@pytest.mark.parametrize("tier", TIERS)
def test_a_measured_restore_is_predicted_exactly_afterwards(tier):
    fitted = fit_restore(COSTS, tier, 1000, 2.0)
    assert fitted.seconds_to_restore(tier, 1000) == pytest.approx(2.0)
    others = [other for other in TIERS if tier != "host" and other != tier]
    for other in others:
        assert fitted.seconds_to_restore(other, 7) == COSTS.seconds_to_restore(other, 7)


def test_what_was_not_measured_is_not_fitted():
    for measured, words in (
        ([], "nothing to fit"),
        ([(0, 10, 0.0)], "seconds=0"),
        ([(0, 10, float("nan"))], "seconds=nan"),
        ([(10, 10, 1.0)], "start=10"),
    ):
        with pytest.raises(ValueError, match=words):
            fit_prefill(COSTS, measured)
    with pytest.raises(ValueError, match="num_tokens=0"):
        fit_restore(COSTS, "host", 0, 1.0)
    with pytest.raises(ValueError, match="tier='tape'"):
        fit_restore(COSTS, "tape", 1, 1.0)


def test_every_chunk_and_every_step_adds_its_dispatch():
    slow = CostModel(SHAPE, replace(H200, dispatch_seconds=0.5), chunk_size=512)
    plain = CostModel(SHAPE, H200, chunk_size=512)
    added = slow.seconds_to_first_token(100, 100 + 1025) - plain.seconds_to_first_token(100, 1125)
    assert added == pytest.approx(3 * 0.5)
    assert slow.seconds_to_decode(100) - plain.seconds_to_decode(100) == pytest.approx(0.5)
    assert slow.seconds_to_recompute(0, 512) - plain.seconds_to_recompute(0, 512) == 0.5


def test_a_restore_is_bound_by_what_takes_longest():
    near = replace(H200, peak_link_bytes=1e15)
    penalty = miss_penalty(CostModel(SHAPE, near), 1000)
    assert penalty.by_name["host"].bound_by == penalty.by_name["hit"].bound_by == "memory"
    assert penalty.by_name["disk"].bound_by == "disk"


def test_the_new_tokens_of_a_prompt_must_fit_too():
    needed = SHAPE.weight_bytes + kv_bytes(SHAPE, 1000)
    exact = replace(H200, memory_bytes=needed / 0.9 + 1)
    fit = miss_penalty(CostModel(SHAPE, exact), 1000, 1).fit
    assert (fit.num_prefixes, fit.fits, fit.needed_devices) == (1, False, 2)
    assert miss_penalty(CostModel(SHAPE, exact), 999, 1).fit.fits


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_data_sheets_agree_with_what_the_kernels_know_of_a_chip(chip):
    """Those are figures of a TensorCore, of which some TPUs have two, as JAX has them: its v5p
    has 2.46 TB/s, 11 % less than Google Cloud says."""
    name = f"tpu-{chip.name}" if chip.platform == "tpu" else chip.name
    cores = 2 if chip.name in ("v4", "v5p", "7x") else 1
    sheet = HARDWARE[name]
    assert sheet.peak_flops == pytest.approx(cores * chip.bf16_flops_per_second, rel=0.01)
    assert sheet.peak_memory_bytes == pytest.approx(cores * chip.hbm_bytes_per_second, rel=0.13)
