"""From Hugging Face tensors to the fused parameters, and every way they can fail to fit."""

from collections.abc import Mapping
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.typing import DTypeLike

from octavo.models.config import LlamaConfig
from octavo.models.llama import Llama
from octavo.models.weights import WeightsError, build_model

CONFIG = LlamaConfig(
    vocab_size=11,
    hidden_size=12,
    intermediate_size=20,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_size=4,
)
EVERYTHING = replace(
    CONFIG, attention_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True
)


def hf_shapes(c: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Hugging Face checkpoint, written out independently of the library."""
    d, f, v = c.hidden_size, c.intermediate_size, c.vocab_size
    q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for i in range(c.num_layers):
        layer = {
            "input_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (q, d),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.o_proj.weight": (d, q),
            "post_attention_layernorm.weight": (d,),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        if c.attention_bias:
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,)}
            layer |= {"self_attn.v_proj.bias": (kv,)}
        if c.attention_out_bias:
            layer |= {"self_attn.o_proj.bias": (d,)}
        if c.mlp_bias:
            layer |= {"mlp.gate_proj.bias": (f,), "mlp.up_proj.bias": (f,)}
            layer |= {"mlp.down_proj.bias": (d,)}
        if c.qk_norm:
            layer |= {"self_attn.q_norm.weight": (c.head_size,)}
            layer |= {"self_attn.k_norm.weight": (c.head_size,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (v, d)
    return shapes


class ArraySource:
    """A source whose tensors are in memory."""

    name = "memory"

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = dict(arrays)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.arrays.items()}

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        return {name: array.dtype for name, array in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


def checkpoint(config: LlamaConfig, dtype: DTypeLike = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = hf_shapes(config)
    return {n: rng.standard_normal(s).astype(np.float32).astype(dtype) for n, s in shapes.items()}


def parameters(model: Llama) -> dict[str, np.ndarray]:
    """Arrays by dotted path, as `layers.0.qkv`."""
    state = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(value[...]) for path, value in state}


def inputs(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)


@pytest.mark.parametrize("index", range(CONFIG.num_layers))
def test_fused_parameters_compute_what_the_tensors_in_them_compute(index):
    c, k, g, h = EVERYTHING, CONFIG.num_kv_heads, CONFIG.num_groups, CONFIG.head_size
    arrays = checkpoint(c)
    p = parameters(build_model(c, ArraySource(arrays)))
    here = f"layers.{index}."

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        name = f"model.layers.{index}.{name}"
        return x @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]

    def close(actual: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)

    x = inputs(c.hidden_size)
    qkv = np.einsum("td,dkgh->tkgh", x, p[here + "qkv"]) + p[here + "qkv_bias"]
    queries = linear(x, "self_attn.q_proj").reshape(3, c.num_heads, h)
    for n in range(c.num_heads):  # query head n belongs to KV head n // G
        close(qkv[:, n // g, n % g], queries[:, n])
    close(qkv[:, :, g], linear(x, "self_attn.k_proj").reshape(3, k, h))
    close(qkv[:, :, g + 1], linear(x, "self_attn.v_proj").reshape(3, k, h))
    heads = inputs(c.num_heads * h)
    out = np.einsum("tkgh,kghd->td", heads.reshape(3, k, g, h), p[here + "out"])
    close(out + p[here + "out_bias"], linear(heads, "self_attn.o_proj"))
    gate_up = np.einsum("td,dcf->tcf", x, p[here + "gate_up"]) + p[here + "gate_up_bias"]
    close(gate_up[:, 0], linear(x, "mlp.gate_proj"))
    close(gate_up[:, 1], linear(x, "mlp.up_proj"))
    hidden = inputs(c.intermediate_size)
    close(hidden @ p[here + "down"] + p[here + "down_bias"], linear(hidden, "mlp.down_proj"))


def test_other_parameters_are_the_tensors_themselves():
    arrays = checkpoint(EVERYTHING)
    p = parameters(build_model(EVERYTHING, ArraySource(arrays)))
    names = {"embed": "embed_tokens", "norm": "norm"}
    for i in range(EVERYTHING.num_layers):
        names[f"layers.{i}.attn_norm"] = f"layers.{i}.input_layernorm"
        names[f"layers.{i}.mlp_norm"] = f"layers.{i}.post_attention_layernorm"
        names[f"layers.{i}.q_norm"] = f"layers.{i}.self_attn.q_norm"
        names[f"layers.{i}.k_norm"] = f"layers.{i}.self_attn.k_norm"
    for ours, theirs in names.items():
        np.testing.assert_array_equal(p[ours], arrays[f"model.{theirs}.weight"])
    np.testing.assert_array_equal(p["head"], arrays["lm_head.weight"])


SWITCHES = [f.name for f in fields(LlamaConfig) if f.type == "bool"]


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_of_the_config_builds_the_model_of_that_shape(switch):
    config = replace(CONFIG, **{switch: True})
    model = build_model(config, ArraySource(checkpoint(config)))
    fresh = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))

    def shapes(m: Llama) -> object:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(nnx.state(m)))

    assert shapes(model) == shapes(fresh)
    assert nnx.graphdef(model) == nnx.graphdef(fresh)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_weights_are_cast_to_the_dtype_that_is_asked_for(stored, dtype):
    arrays = checkpoint(CONFIG, stored)
    model = build_model(CONFIG, ArraySource(arrays), dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
    expected = arrays["model.layers.1.mlp.down_proj.weight"].T.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(model.layers[1].down[...], expected)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bool_])
def test_a_dtype_that_is_not_floating_point_is_refused(dtype):
    with pytest.raises(ValueError, match="must be a floating-point type"):
        build_model(CONFIG, ArraySource(checkpoint(CONFIG)), dtype=dtype)


def test_the_model_does_not_share_memory_with_the_source():
    arrays = checkpoint(CONFIG)
    model = build_model(CONFIG, ArraySource(arrays))
    before = np.array(model.embed[...])
    for array in arrays.values():
        array.fill(np.nan)
    np.testing.assert_array_equal(model.embed[...], before)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state(model)))


def test_tensors_that_say_nothing_new_are_ignored():
    tied = replace(CONFIG, tie_embeddings=True)
    arrays = checkpoint(tied)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    assert build_model(tied, ArraySource(arrays)).head is None


def test_every_mismatch_is_reported_at_once():
    arrays = checkpoint(CONFIG)
    del arrays["model.norm.weight"], arrays["model.layers.1.mlp.up_proj.weight"]
    arrays["model.layers.0.mlp.up_proj.weight"] = np.zeros((20, 13), np.float32)
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    arrays["lm_head.weight"] = np.zeros((11, 12), np.int8)
    with pytest.raises(WeightsError) as error:
        build_model(CONFIG, ArraySource(arrays))
    message = str(error.value)
    assert "memory: the tensors do not fit the config" in message
    assert "missing tensors (2): model.layers.1.mlp.up_proj.weight (20, 12); model.norm" in message
    assert "unexpected tensors (1): model.layers.0.self_attn.q_proj.bias (24,)" in message
    assert "(1): model.layers.0.mlp.up_proj.weight is (20, 13), expected (20, 12)" in message
    assert "not floating point (1): lm_head.weight is int8" in message


def test_a_long_list_of_mismatches_is_cut():
    arrays = {n: a for n, a in checkpoint(CONFIG).items() if ".layers." not in n}
    arrays |= {f"x.{i}": np.zeros(1, np.float32) for i in range(100)}
    with pytest.raises(WeightsError, match=r"and 92 more") as error:
        build_model(CONFIG, ArraySource(arrays))
    assert len(str(error.value)) < 2_000


def test_a_config_with_absurdly_many_layers_fails_before_any_is_made():
    huge = replace(CONFIG, num_layers=10**12)
    with pytest.raises(WeightsError, match=r"1000000000000 layers, but there are only 21 tensors"):
        build_model(huge, ArraySource(checkpoint(CONFIG)))


def test_sizes_are_checked_before_memory_is_taken():
    huge = replace(CONFIG, vocab_size=2**50)
    with pytest.raises(WeightsError, match=r"embed_tokens.weight is \(11, 12\), expected \(11258"):
        build_model(huge, ArraySource(checkpoint(CONFIG)))


def test_progress_counts_the_parameters():
    calls = []
    source = ArraySource(checkpoint(CONFIG))
    build_model(CONFIG, source, progress=lambda *call: calls.append(call))
    total = 2 + 6 * CONFIG.num_layers + 1  # embedding, norm; fused layer parameters; head
    assert calls == [(done, total, "weights") for done in range(1, total + 1)]
