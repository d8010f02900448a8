"""FLOPs, bytes and seconds: numbers worked out by hand, and models' sizes from their configs."""

import json

import numpy as np
import pytest

from octavo.paged.cost_model import (
    HARDWARE,
    MODEL_SHAPES,
    Hardware,
    ModelShape,
    kv_bytes,
    model_shape,
    prefill_flops,
    prefill_seconds,
    restore_seconds,
)

LONG = 131_072
SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "num_params": 1000}
HF_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def attention_flops(shape, start, stop):
    return prefill_flops(shape, start, stop) - 2 * shape.num_params * (stop - start)


def test_attention_of_a_long_prompt_counts_query_heads_and_all_layers():
    """281.5 TFLOP a layer and 22.5 PFLOP for 80 of them; with the 8 KV heads put for the 64 query
    heads, and one layer, it would be 35.2 TFLOP for the whole request."""
    shape = MODEL_SHAPES["llama-3.1-70b"]
    flops = attention_flops(shape, 0, LONG)
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
    assert restore_seconds(shape, hardware, LONG) == pytest.approx(0.31, abs=0.005)
    assert prefill_seconds(shape, hardware, 0, LONG) == pytest.approx(14, rel=0.1)


def test_a_hit_that_leaves_little_takes_as_long_as_reading_the_weights_and_the_cache():
    shape, hardware = MODEL_SHAPES["llama-3.1-8b"], HARDWARE["h100"]
    num_bytes = 2 * shape.num_params + kv_bytes(shape, 4096)
    expected = num_bytes / hardware.memory_bytes_per_second
    assert prefill_seconds(shape, hardware, 4095, 4096) == pytest.approx(expected)
    both = prefill_seconds(shape, hardware, np.array([4095.0, 0]), np.array([4096.0, LONG]))
    assert both[0] == pytest.approx(expected)
    assert both[1] == pytest.approx(prefill_seconds(shape, hardware, 0, LONG))


def test_every_size_changes_the_cost():
    hardware = HARDWARE["h100"]

    def costs(shape, hardware):
        return (
            prefill_flops(shape, 5, 1000),
            kv_bytes(shape, 10),
            float(prefill_seconds(shape, hardware, 99_999, 100_000)),
            float(prefill_seconds(shape, hardware, 0, 100_000)),
            restore_seconds(shape, hardware, 10),
        )

    base = costs(ModelShape(**SIZES), hardware)
    for field in (*SIZES, "kv_dtype_bytes", "param_dtype_bytes"):
        value = getattr(ModelShape(**SIZES), field)
        assert costs(ModelShape(**{**SIZES, field: 2 * value}), hardware) != base, field
    for field, value in vars(hardware).items():
        other = Hardware(**{**vars(hardware), field: 2 * value})
        assert costs(ModelShape(**SIZES), other) != base, field


def test_a_config_gives_the_shape_of_the_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_8B))
    for path in (tmp_path, tmp_path / "config.json"):
        assert model_shape(str(path)) == model_shape("llama-3.1-8b")


def test_what_a_config_leaves_out_has_its_usual_meaning():
    config = {key: HF_8B[key] for key in HF_8B if key not in ("num_key_value_heads", "torch_dtype")}
    shape = ModelShape.from_hf(config)
    assert (shape.num_kv_heads, shape.head_size, shape.kv_dtype_bytes) == (32, 128, 2)
    assert ModelShape.from_hf({**config, "head_dim": 64}).head_size == 64
    assert ModelShape.from_hf({**config, "dtype": "float32"}).kv_dtype_bytes == 4


def test_the_parameters_are_those_that_multiply_every_prompt_token():
    """Without embedding and output head: 2 x 128,256 x 4,096 of the 8.03 billion."""
    shape = MODEL_SHAPES["llama-3.1-8b"]
    norms = 65 * 4096
    assert shape.num_params + norms + 2 * 128_256 * 4096 == 8_030_261_248


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_key_value_heads": 5}, "must be a multiple"),
        ({"torch_dtype": "int8"}, "dtype='int8'"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        ModelShape.from_hf({**HF_8B, **change})


@pytest.mark.parametrize("content", ["", "[]", "{", '{"hidden_size": 1}', "\xff", "[" * 100_000])
def test_a_file_that_is_no_config_is_refused_by_its_path(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        model_shape(str(path))


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    for name in ("llama-9", "", str(tmp_path)):
        with pytest.raises(ValueError, match=r"llama-3\.1-8b.* no config\.json"):
            model_shape(name)


@pytest.mark.parametrize("field", list(SIZES))
def test_a_shape_takes_positive_integers_only(field):
    for value in (0, -1, 1.5, "8", True):
        with pytest.raises(ValueError, match=field):
            ModelShape(**{**SIZES, field: value})


def test_hardware_takes_positive_numbers_only():
    for value in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="link_bytes_per_second"):
            Hardware(flops_per_second=1, link_bytes_per_second=value, memory_bytes_per_second=1)
