"""int8 weights: how far they are from the weights, and that products and models use just them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.models import HiddenStates, Llama, LlamaConfig, load_model
from octavo.models.loading import fingerprint
from octavo.models.lora import LoraStack, init_lora
from octavo.models.packed import PackedParameter
from octavo.models.quantized import QuantizedWeight, quantize
from octavo.models.weights import build_model
from octavo.pallas_kernels import linear, pack_weight

CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=48,  # one group and a half
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
)
LINEAR = {"qkv", "out", "gate_up", "down"}


def weight_of(num_inputs: int, num_outputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_inputs, num_outputs)).astype("f4")


def dequantized(weight: QuantizedWeight) -> np.ndarray:
    """`float32[in, out]`, by unpacking bytes as a file would hold them."""
    words = np.ascontiguousarray(np.asarray(weight.words).transpose(1, 0, 2))  # [G, J, out]
    numbers = words[..., None].view("<i1").astype(np.float32)  # [G, J, out, 4]
    groups = numbers.transpose(0, 1, 3, 2).reshape(len(words), -1, words.shape[-1])
    scaled = groups * np.asarray(weight.scale)[:, None]
    return scaled.reshape(-1, words.shape[-1])[: weight.num_inputs]


@pytest.mark.parametrize("num_inputs", [1, 32, 80, 576])
def test_no_weight_moves_by_more_than_half_a_step_of_its_group(num_inputs: int) -> None:
    weight = weight_of(num_inputs, 24)
    weight[:, 3] = 0  # groups of nothing
    weight[num_inputs // 2, 5] = 1e4  # an outlier spoils its own group only
    weight[:, 7] *= 1e-38  # their scale is less than float32 holds
    quantized = quantize(jnp.asarray(weight), (24,))
    padded = np.pad(weight, ((0, -num_inputs % 32), (0, 0))).reshape(-1, 32, 24)
    step = np.repeat(np.abs(padded).max(axis=1) / 127, 32, axis=0)[:num_inputs]
    off = np.abs(dequantized(quantized) - weight)
    np.testing.assert_array_less(off, 0.5001 * step + 1e-37)
    assert quantized.words.nbytes + quantized.scale.nbytes == padded.size * 1.125


def test_what_int8_can_hold_comes_back_exactly() -> None:
    numbers = np.resize(np.arange(-127, 128), 64 * 40).reshape(64, 40).astype(np.float32)
    numbers[::32] = 127  # every group has the same scale
    weight = numbers * 0.25
    quantized = quantize(jnp.asarray(weight), (40,))
    np.testing.assert_array_equal(dequantized(quantized), weight)
    ids = np.array([39, 0, 17, 0], np.int32)
    np.testing.assert_array_equal(quantized.outputs(jnp.asarray(ids)), weight[:, ids].T)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_no_loop_keeps_the_weight_unpacked(num_rows: int, packed: bool) -> None:
    quantized = quantize(jnp.asarray(weight_of(256, 4096)), (4096,))
    weight = quantized.words, quantized.scale
    if packed:
        weight = pack_weight(*weight), None

    @jax.jit
    def decode(x: jax.Array, weight: tuple) -> jax.Array:
        return jax.lax.fori_loop(0, 4, lambda _, x: linear(x, *weight)[:, :256], x)

    program = decode.lower(jnp.ones((num_rows, 256)), weight).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < quantized.words.nbytes


def model(**changes) -> Llama:
    """With weights at a scale at which layers matter."""
    whole = Llama(replace(CONFIG, **changes), rngs=nnx.Rngs(0))
    for layer in whole.layers:
        layer.out[...] = layer.out[...] * 20
        layer.down[...] = layer.down[...] * 20
    return whole


def logits_of(model: Llama, tokens: jax.Array) -> jax.Array:
    """With the weights as an argument: as constants, XLA would unpack them when it compiles."""
    graphdef, state = nnx.split(model)
    return jax.jit(lambda s: nnx.merge(graphdef, s).sequence_logits(tokens))(state)


def parameters(model: Llama) -> dict[tuple, object]:
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_that_products_read_are_quantised_and_no_others(tied: bool) -> None:
    whole = model(tie_embeddings=tied, attention_bias=True, qk_norm=True)
    before, after = parameters(whole), parameters(whole.quantized("int8"))
    assert before.keys() == after.keys()
    changed = {p[-1] for p, value in after.items() if isinstance(value, QuantizedWeight)}
    assert changed == LINEAR | ({"embed"} if tied else {"head"})
    for path, value in after.items():
        if not isinstance(value, QuantizedWeight):
            assert value is before[path]
    assert not any(isinstance(value, QuantizedWeight) for value in parameters(whole).values())
    assert whole.quantized(None) is whole


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("w8a8", 0.1)])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_stay_close_to_those_of_the_weights(
    tied: bool, quantization: str, most: float
) -> None:
    whole = model(tie_embeddings=tied)
    tokens = jnp.arange(40)
    expected, logits = (
        np.asarray(logits_of(m, tokens)) for m in (whole, whole.quantized(quantization))
    )
    off = np.abs(logits - expected).max() / expected.std()
    assert 1e-4 < off < most
    assert logits.dtype == np.float32


@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_same_model(tied: bool, quantization: str | None) -> None:
    plain = model(tie_embeddings=tied, attention_bias=True).quantized(quantization)
    packed = plain.packed()
    is_packed = {p[-1] for p, v in parameters(packed).items() if isinstance(v, PackedParameter)}
    assert is_packed == LINEAR | ({"embed"} if tied else {"head"})
    for path, value in parameters(packed.packed()).items():  # once is enough
        if isinstance(value, PackedParameter):
            before = parameters(packed)[path]
            assert isinstance(before, PackedParameter)
            assert value.weight.panels is before.weight.panels
    tokens = jnp.arange(40)
    # XLA sums up a head that has its outputs first in another order; int8 ones never do.
    atol = 0 if quantization else 1e-6
    np.testing.assert_allclose(
        logits_of(packed, tokens), logits_of(plain, tokens), rtol=0, atol=atol
    )
    hidden = HiddenStates(
        residual=jnp.asarray(weight_of(5, CONFIG.hidden_size)),
        attended=jnp.asarray(weight_of(5, CONFIG.num_heads * CONFIG.head_size)),
        adapter=None,
    )
    np.testing.assert_allclose(packed.logits(hidden), plain.logits(hidden), atol=1e-5)
    stack = init_lora(CONFIG, num_slots=1, rank=2, dtype=jnp.float32)
    with pytest.raises(ValueError, match="computed with"):
        plain.logits(hidden, stack)


def test_a_model_in_bfloat16_is_packed_nowhere() -> None:
    half = Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert half.packed() is half


def test_a_model_in_bfloat16_computes_in_bfloat16_between_its_products() -> None:
    half = Llama(replace(CONFIG, tie_embeddings=True), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    half = half.quantized("int8")
    embed = half.embed.get_value()
    assert half.dtype == jnp.bfloat16 and isinstance(embed, QuantizedWeight)
    x = embed.outputs(jnp.arange(4)).astype(half.dtype)
    attended = jnp.zeros((4, CONFIG.num_heads * CONFIG.head_size), half.dtype)
    how = {"batch_invariant": False, "implementation": None}
    assert half.layers[0].finish(x, attended, None, **how).dtype == jnp.bfloat16
    hidden = HiddenStates(residual=x, attended=attended, adapter=None)
    assert half.logits(hidden).dtype == jnp.float32


def test_an_adapter_can_be_trained_on_top() -> None:
    whole = model(tie_embeddings=True, num_layers=1)
    stack = init_lora(whole.config, num_slots=1, rank=2, dtype=jnp.float32)
    stack = jax.tree.map(
        lambda a: jnp.asarray(0.01 * np.resize(np.arange(5.0), a.shape), "f4"), stack
    )
    tokens = jnp.arange(12)

    def gradient(model: Llama) -> jax.Array:
        graphdef, state = nnx.split(model)

        def loss(stack: LoraStack, state: nnx.State) -> jax.Array:
            logits = nnx.merge(graphdef, state).sequence_logits(tokens, stack)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

        gradients = jax.jit(jax.grad(loss))(stack, state)
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(gradients)])

    expected, found = gradient(whole), gradient(whole.quantized("int8"))
    assert jnp.linalg.norm(expected) > 0
    assert jnp.linalg.norm(found - expected) < 0.1 * jnp.linalg.norm(expected)


class Source:
    """Random tensors, made as they are read; what is on the device meanwhile is counted."""

    name = "memory"

    def __init__(self, config: LlamaConfig):
        d, f, q = config.hidden_size, config.intermediate_size, config.num_heads * config.head_size
        kv = config.num_kv_heads * config.head_size
        self.shapes = {
            "model.embed_tokens.weight": (config.vocab_size, d),
            "model.norm.weight": (d,),
        }
        for i in range(config.num_layers):
            layer = {
                "input_layernorm": (d,),
                "post_attention_layernorm": (d,),
                "self_attn.q_proj": (q, d),
                "self_attn.k_proj": (kv, d),
                "self_attn.v_proj": (kv, d),
                "self_attn.o_proj": (d, q),
                "mlp.gate_proj": (f, d),
                "mlp.up_proj": (f, d),
                "mlp.down_proj": (d, f),
            }
            self.shapes |= {f"model.layers.{i}.{n}.weight": s for n, s in layer.items()}
        self.dtypes = dict.fromkeys(self.shapes, np.dtype(np.float32))
        self.most_bytes = 0

    def read(self, name: str) -> np.ndarray:
        self.most_bytes = max(self.most_bytes, sum(a.nbytes for a in jax.live_arrays()))
        return weight_of(int(np.prod(self.shapes[name])), 1, len(name)).reshape(self.shapes[name])


def test_loading_quantises_as_it_reads() -> None:
    config = replace(CONFIG, num_layers=24, hidden_size=128, tie_embeddings=True)
    build_model(config, Source(config), quantization="int8")  # what compiling keeps is there now
    source, before = Source(config), sum(a.nbytes for a in jax.live_arrays())
    built = build_model(config, source, quantization="int8")
    whole = build_model(config, Source(config))
    for path, value in parameters(whole.quantized("int8")).items():
        jax.tree.map(np.testing.assert_array_equal, value, parameters(built)[path])
    size, whole_size = (
        sum(a.nbytes for a in jax.tree.leaves(nnx.state(m))) for m in (built, whole)
    )
    assert size < 0.3 * whole_size
    largest = max(int(np.prod(shape)) for shape in source.shapes.values()) * 4
    assert source.most_bytes - before < size + 8 * largest < 0.7 * whole_size


def test_the_fingerprint_says_how_the_weights_are_kept(tmp_path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    plain = fingerprint(CONFIG, "float32", [path])
    assert plain == fingerprint(CONFIG, "float32", [path], None)
    assert plain != fingerprint(CONFIG, "float32", [path], "int8")


def test_an_unknown_quantisation_is_refused_before_anything_is_read() -> None:
    message = r"quantization='int4' must be None or one of 'int8'"
    with pytest.raises(ValueError, match=message):
        load_model("no such file", quantization="int4")
    with pytest.raises(ValueError, match=message):
        model().quantized("int4")
    with pytest.raises(ValueError, match=message):
        build_model(CONFIG, Source(CONFIG), quantization="int4")
