"""FLOPs, bytes and seconds: numbers worked out by hand, and what follows from every size."""

from dataclasses import fields, replace

import numpy as np
import pytest

from octavo.paged.cost_model import (
    HARDWARE,
    MODEL_SHAPES,
    CostModel,
    Efficiency,
    Hardware,
    ModelShape,
    attention_flops,
    decode_work,
    head_work,
    kv_bytes,
    prefill_flops,
    prefill_seconds,
    prefill_work,
    roofline,
)

LONG = 131_072
SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "num_params": 1000}
RATES = [field.name for field in fields(Hardware) if field.name.startswith("peak_")]
PLAIN = Hardware(
    name="plain", peak_flops=1e12, peak_memory_bytes=1e10, memory_bytes=1e9, peak_link_bytes=1e9
)


def test_attention_of_a_long_prompt_counts_query_heads_and_all_layers():
    """281.5 TFLOP a layer and 22.5 PFLOP for 80 of them; with the 8 KV heads put for the 64 query
    heads, and one layer, it would be 35.2 TFLOP for the whole request."""
    shape = MODEL_SHAPES["llama-3.1-70b"]
    flops = attention_flops(shape, 0, LONG)
    assert flops == prefill_flops(shape, 0, LONG) - 2 * shape.num_params * LONG
    assert flops == 80 * 2 * 64 * 128 * LONG**2
    assert flops / 80 == pytest.approx(281.5e12, rel=2e-4)
    assert flops == pytest.approx(22.5e15, rel=2e-3)


@pytest.mark.parametrize("t", [1, 2, 1000, LONG])
def test_a_hit_that_leaves_t_tokens_costs_t_times_the_context(t):
    for shape in MODEL_SHAPES.values():
        attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * t * (LONG - t / 2)
        assert prefill_flops(shape, LONG - t, LONG) == attention + 2 * shape.num_params * t


def test_a_prefill_in_parts_costs_what_it_costs_at_once():
    shape = MODEL_SHAPES["llama-3.1-8b"]
    parts = [prefill_flops(shape, a, b) for a, b in ((0, 7), (7, 512), (512, 512), (512, LONG))]
    assert sum(parts) == prefill_flops(shape, 0, LONG)


def test_flops_of_integers_are_exact_and_arrays_agree():
    shape = MODEL_SHAPES["llama-3.1-70b"]
    stop = 10**9  # more than 2**63 FLOPs
    exact = prefill_flops(shape, 0, stop)
    assert isinstance(exact, int) and exact > 2**63
    arrays = prefill_flops(shape, np.zeros(2), np.array([1.0, stop]))
    np.testing.assert_allclose(arrays, [float(prefill_flops(shape, 0, 1)), float(exact)])


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("llama-3.1-8b", 131_072), ("llama-3.1-70b", 327_680), ("smollm2-135m", 23_040)],
)
def test_kv_bytes_of_a_token_count_kv_heads(name, num_bytes):
    assert kv_bytes(MODEL_SHAPES[name], 1) == num_bytes
    assert kv_bytes(MODEL_SHAPES[name], LONG) == num_bytes * LONG


def test_restoring_a_long_prefix_beats_computing_it_on_a_fast_link():
    shape, hardware = MODEL_SHAPES["llama-3.1-8b"], HARDWARE["h100"]
    assert CostModel(shape, hardware).seconds_to_restore("host", LONG) == pytest.approx(
        17.18e9 / (0.85 * 64e9), rel=1e-3
    )
    flops = 32 * 2 * 32 * 128 * LONG**2 + 2 * 6_979_321_856 * LONG
    assert prefill_seconds(shape, hardware, 0, LONG) == pytest.approx(flops / (0.45 * 989e12))


def test_a_hit_that_leaves_little_takes_as_long_as_reading_the_weights_and_the_cache():
    shape, hardware = MODEL_SHAPES["llama-3.1-8b"], HARDWARE["h100"]
    num_bytes = 2 * shape.num_params + kv_bytes(shape, 4096 + 1)  # one is written
    expected = num_bytes / (0.8 * 3.35e12)
    assert prefill_seconds(shape, hardware, 4095, 4096) == pytest.approx(expected)
    both = prefill_seconds(shape, hardware, np.array([4095.0, 0]), np.array([4096.0, LONG]))
    assert both[0] == pytest.approx(expected)
    assert both[1] == pytest.approx(prefill_seconds(shape, hardware, 0, LONG))


def test_every_chunk_reads_the_weights_and_the_cache_before_it():
    shape = ModelShape(**SIZES)
    work = prefill_work(shape, 100, 350, chunk_size=100)
    assert work.weight_bytes == 3 * 1000 * 2
    assert work.kv_bytes == kv_bytes(shape, 200 + 300 + 350 + 250)
    assert work.flops == prefill_flops(shape, 100, 350)
    assert prefill_work(shape, 100, 350).kv_bytes == kv_bytes(shape, 350 + 250)
    nothing = prefill_work(shape, 100, 100, chunk_size=100)
    assert (nothing.flops, nothing.num_bytes) == (0, 0)
    arrays = prefill_work(shape, np.array([100, 100]), np.array([350, 100]), chunk_size=100)
    assert arrays.num_bytes.tolist() == [work.num_bytes, 0]
    hardware = replace(PLAIN, dispatch_seconds=5.0)
    seconds = prefill_seconds(shape, hardware, 100, 350, chunk_size=100)
    assert seconds == pytest.approx(15, rel=1e-3)


def test_a_window_bounds_what_attention_computes_and_reads():
    shape, whole = ModelShape(**SIZES, sliding_window=10), ModelShape(**SIZES)
    assert attention_flops(shape, 0, 10) == attention_flops(whole, 0, 10)
    pairs = 10 * 10 / 2 + 90 * 10
    assert attention_flops(shape, 0, 100) == 4 * 2 * 4 * 8 * pairs
    assert attention_flops(shape, np.array([0]), np.array([100])) == 4 * 2 * 4 * 8 * pairs
    assert prefill_work(shape, 0, 100, chunk_size=5).kv_bytes <= kv_bytes(shape, 20 * 15 + 100)
    assert decode_work(shape, 100).kv_bytes == kv_bytes(shape, 10 + 1)
    shared = decode_work(shape, 100, num_seqs=3, shared_len=95)
    assert shared.kv_bytes == kv_bytes(shape, 5 + 3 * 5 + 3)


def test_decoding_does_as_many_flops_per_byte_as_queries_share_a_head():
    """G = N/K FLOPs per byte of a two-byte cache; S sequences that share all raise it S-fold."""
    shape = MODEL_SHAPES["llama-3.1-70b"]
    work = decode_work(shape, LONG)
    assert work.attention_flops / kv_bytes(shape, LONG) == 64 / 8
    assert work.matmul_flops == 2 * (shape.num_params + 128_256 * 8192)
    assert work.weight_bytes == 2 * (shape.num_params + 128_256 * 8192)
    point = roofline(work, HARDWARE["h200"])
    assert point.bound_by == "memory" and point.intensity < 8 < point.ridge
    assert point.flops_per_second == pytest.approx(point.intensity * 0.8 * 4.8e12)
    shared = decode_work(shape, LONG, num_seqs=16, shared_len=LONG)
    assert shared.attention_flops == 16 * work.attention_flops
    assert shared.kv_bytes == kv_bytes(shape, LONG + 16)
    assert decode_work(shape, LONG, num_seqs=16).kv_bytes == 16 * kv_bytes(shape, LONG + 1)
    with pytest.raises(ValueError, match="shared_len=11"):
        decode_work(shape, 10, shared_len=11)


def test_a_prefill_is_bound_by_compute_and_the_ridge_is_flops_over_bytes():
    hardware = HARDWARE["h200"]
    point = roofline(prefill_work(MODEL_SHAPES["llama-3.1-8b"], 0, LONG), hardware)
    assert point.bound_by == "compute"
    assert point.flops_per_second == hardware.matmul_flops_per_second
    assert point.ridge == pytest.approx(0.45 * 989e12 / (0.8 * 4.8e12))


def test_every_size_changes_the_cost():
    hardware = HARDWARE["h100"]

    def costs(shape, hardware):
        model = CostModel(shape, hardware, chunk_size=64)
        return (
            prefill_flops(shape, 5, 1000),
            kv_bytes(shape, 10),
            head_work(shape).flops,
            shape.weight_bytes,
            float(model.seconds_to_recompute(99_999, 100_000)),
            float(model.seconds_to_recompute(0, 100_000)),
            *(model.seconds_to_restore(tier, 10) for tier in ("host", "disk", "remote")),
            *(model.seconds_to_store(tier, 10) for tier in ("host", "disk", "remote")),
        )

    sizes = SIZES | {"num_head_params": 7, "num_idle_params": 5, "sliding_window": 50}
    base = costs(ModelShape(**sizes), hardware)
    for field in (*sizes, "kv_dtype_bytes", "param_dtype_bytes"):
        value = getattr(ModelShape(**sizes), field)
        assert costs(ModelShape(**{**sizes, field: 2 * value}), hardware) != base, field
    shape = MODEL_SHAPES["llama-3.1-8b"]
    base = costs(shape, hardware)
    for field in RATES:
        value = getattr(hardware, field) / 8
        assert costs(shape, replace(hardware, **{field: value})) != base, field
    for field, value in vars(Efficiency()).items():
        other = replace(hardware, efficiency=replace(Efficiency(), **{field: (value or 0.8) / 8}))
        assert costs(shape, other) != base, field


@pytest.mark.parametrize("field", list(SIZES))
def test_a_shape_takes_positive_integers_only(field):
    for value in (0, -1, 1.5, "8", True):
        with pytest.raises(ValueError, match=field):
            ModelShape(**{**SIZES, field: value})


def test_what_a_model_can_lack_may_be_zero_and_not_less():
    assert ModelShape(**SIZES, num_head_params=0).weight_bytes == 2000
    for field in ("num_head_params", "num_idle_params", "sliding_window"):
        with pytest.raises(ValueError, match=f"{field}=-1"):
            ModelShape(**SIZES, **{field: -1})


@pytest.mark.parametrize("field", [*RATES, "memory_bytes"])
def test_hardware_takes_positive_numbers_only(field):
    for value in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=field):
            replace(PLAIN, **{field: value})


def test_a_share_of_a_peak_is_a_positive_number():
    with pytest.raises(ValueError, match=r"efficiency\.link=0"):
        Efficiency(link=0)
    with pytest.raises(ValueError, match="dispatch_seconds=-1"):
        replace(PLAIN, dispatch_seconds=-1)
