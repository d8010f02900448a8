"""The sizes of models: from their configs, and against what they were published with."""

import json

import pytest

from octavo.paged.cost_model import MODEL_SHAPES, ModelShape, model_shape

HF_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}


def rms_norms(layers, width):
    return (2 * layers + 1) * width


# Parameters that the safetensors files of each model hold, as Hugging Face counts them; the
# norms and biases among them multiply nothing, or next to nothing.
@pytest.mark.parametrize(
    ("name", "published", "uncounted"),
    [
        ("llama-3.2-1b", 1_235_814_400, rms_norms(16, 2048)),
        ("llama-3.2-3b", 3_212_749_824, rms_norms(28, 3072)),
        ("llama-3.1-8b", 8_030_261_248, rms_norms(32, 4096)),
        ("llama-3.1-70b", 70_553_706_496, rms_norms(80, 8192)),
        ("llama-3.1-405b", 405_853_388_800, rms_norms(126, 16384)),
        ("smollm2-135m", 134_515_008, rms_norms(30, 576)),
        ("smollm2-360m", 361_821_120, rms_norms(32, 960)),
        ("smollm2-1.7b", 1_711_376_384, rms_norms(24, 2048)),
        ("mistral-7b-v0.3", 7_248_023_552, rms_norms(32, 4096)),
        ("qwen2.5-7b", 7_615_616_512, rms_norms(28, 3584) + 28 * (28 + 8) * 128),
        ("qwen2.5-72b", 72_706_203_648, rms_norms(80, 8192) + 80 * (64 + 16) * 128),
        ("qwen3-0.6b", 596_049_920, rms_norms(28, 1024) + 28 * 2 * 128),
        ("qwen3-8b", 8_190_735_360, rms_norms(36, 4096) + 36 * 2 * 128),
        ("qwen3-32b", 32_762_123_264, rms_norms(64, 5120) + 64 * 2 * 128),
    ],
)
def test_a_preset_has_the_parameters_of_the_published_model(name, published, uncounted):
    shape = MODEL_SHAPES[name]
    assert shape.weight_bytes == 2 * (published - uncounted)


def test_every_preset_is_held_against_its_publication():
    (mark,) = test_a_preset_has_the_parameters_of_the_published_model.pytestmark
    assert {case[0] for case in mark.args[1]} == set(MODEL_SHAPES)


def test_prompt_tokens_are_not_multiplied_by_embedding_and_head():
    """Of the 8.03 billion, 2 x 128,256 x 4,096 are not."""
    shape = MODEL_SHAPES["llama-3.1-8b"]
    assert shape.num_params == 6_979_321_856
    assert shape.num_head_params == shape.num_idle_params == 128_256 * 4096
    assert MODEL_SHAPES["llama-3.2-1b"].num_idle_params == 0  # tied: the head is the embedding


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
    assert ModelShape.from_hf({**config, "tie_word_embeddings": True}).num_idle_params == 0


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"sliding_window": 4096}, 4096),  # Mistral 7B v0.1
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),  # Qwen 2
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, None),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"] * 2}, 4096),
    ],
)
def test_a_window_counts_where_all_layers_have_it(change, window):
    assert ModelShape.from_hf({**HF_8B, **change}).sliding_window == window


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"num_key_value_heads": 5}, "must be a multiple"),
        ({"torch_dtype": "int8"}, "dtype='int8'"),
        ({"torch_dtype": ["bfloat16"]}, "dtype="),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "in some layers"),
        ({"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}, "layers"),
        ({"sliding_window": -1}, "sliding_window=-1"),
        ({"layer_types": 5, "sliding_window": 9}, "layer_types=5"),
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


def test_devices_share_heads_evenly_or_copy_whole_kv_heads():
    shape = MODEL_SHAPES["llama-3.1-70b"]
    assert shape.on_devices(8) == shape
    assert shape.on_devices(16).num_kv_heads == 16
    assert shape.device_counts() == (1, 2, 4, 8, 16, 32, 64)
    assert MODEL_SHAPES["qwen2.5-7b"].device_counts() == (1, 2, 4, 28)
    for count in (0, -1, 3, 128):
        with pytest.raises(ValueError, match=f"num_devices={count}"):
            shape.on_devices(count)
