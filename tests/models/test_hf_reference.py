"""Logits of Hugging Face transformers, reproduced from the same files over a paged cache.

benchmarks/make_hf_reference.py made the models in hf/ and the logits in hf_reference.npz.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.models.config import LlamaConfig, RopeScaling
from octavo.models.llama import Llama
from octavo.models.lora import LoraBatch, LoraStack
from octavo.models.safetensors_io import SafetensorsSource, read_json_object
from octavo.models.weights import build_model
from octavo.paged import packed_batch
from octavo.pallas_kernels import cache_shape, init_kv_cache

HERE = Path(__file__).resolve().parent
NAMES = sorted(path.name for path in (HERE / "hf").iterdir())
TOLERANCE = 2e-4
BLOCK_SIZE, NUM_BLOCKS = 4, 14
CHUNK_LENS, PADDED_LEN = (27, 13), 32


def raw_config(name: str) -> dict:
    return read_json_object(HERE / "hf" / name / "config.json")


@cache
def reference(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The prompt `int32[40]` and its logits `float32[40, V]`."""
    with np.load(HERE / "hf_reference.npz") as arrays:
        return arrays[f"{name}/ids"], arrays[f"{name}/logits"]


@cache
def load(name: str) -> Llama:
    """The model as the library loads a directory, without the tokenizer."""
    directory = HERE / "hf" / name
    config = LlamaConfig.from_hf(raw_config(name))
    return build_model(config, SafetensorsSource(directory), dtype=jnp.float32)


def with_config(model: Llama, config: LlamaConfig) -> Llama:
    """The same weights, run under another config."""
    # Layers are handed the angles and do not look at what these follow from. Left as it is there,
    # a change of RoPE compiles no layer anew, which is what takes the time here.
    old = model.config
    of_layers = replace(config, rope_theta=old.rope_theta, rope_scaling=old.rope_scaling)
    other = nnx.eval_shape(lambda: Llama(of_layers, rngs=nnx.Rngs(0)))
    other = nnx.merge(nnx.graphdef(other), nnx.state(model))
    other.config = config
    return other


def run(model: Llama, ids: np.ndarray, lora: LoraStack | None = None) -> np.ndarray:
    """Logits of all of `ids`, computed in two chunks that are padded to one size.

    Every token takes the adapter in the first slot of `lora`.
    """
    ones = jnp.ones(PADDED_LEN, jnp.int32)
    lora_batch = None if lora is None else LoraBatch.of(lora, ones)
    config = model.config
    blocks = np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS))
    tables = jnp.asarray(blocks[None, : -(-len(ids) // BLOCK_SIZE)], jnp.int32)
    shape = cache_shape(
        NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_size, jax.default_backend()
    )
    kv_cache = init_kv_cache(config.num_layers, shape, jnp.float32)
    logits, done = [], 0
    for chunk_len in CHUNK_LENS:
        tokens = np.zeros(PADDED_LEN, np.int32)
        tokens[:chunk_len] = ids[done : done + chunk_len]
        done += chunk_len
        context_lens = jnp.asarray([done], jnp.int32)
        batch, position = packed_batch(
            tables,
            context_lens,
            jnp.asarray([chunk_len], jnp.int32),
            num_tokens=PADDED_LEN,
            block_size=BLOCK_SIZE,
        )
        batch = replace(batch, logit_rows=jnp.arange(PADDED_LEN, dtype=jnp.int32))
        with jax.default_matmul_precision("highest"):
            chunk, kv_cache = model(jnp.asarray(tokens), position, kv_cache, batch, lora_batch)
        logits.append(np.asarray(chunk)[:chunk_len])
    return np.concatenate(logits)


def test_there_is_a_reference_for_every_model_and_the_other_way_round():
    with np.load(HERE / "hf_reference.npz") as arrays:
        assert sorted({key.split("/")[0] for key in arrays}) == NAMES
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_two_chunks_are_those_of_transformers(name):
    ids, expected = reference(name)
    np.testing.assert_allclose(run(load(name), ids), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama-tied-bias", "mistral-window", "qwen3"])
def test_logits_of_a_whole_sequence_without_a_cache_are_the_same(name):
    ids, expected = reference(name)
    with jax.default_matmul_precision("highest"):
        got = load(name).sequence_logits(jnp.asarray(ids))
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_as_transformers_4_wrote_it_is_read_the_same(name):
    # Published files are older than `rope_parameters`: theta at the top, the scheme in
    # `rope_scaling` or null, and in the oldest of them `type` for `rope_type`.
    raw = raw_config(name)
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    for key in ("rope_type", "type"):
        raw["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
        assert LlamaConfig.from_hf(raw) == load(name).config


def rope(**changes: object) -> Callable[[LlamaConfig], LlamaConfig]:
    def change(config: LlamaConfig) -> LlamaConfig:
        scaling = config.rope_scaling
        assert isinstance(scaling, RopeScaling)
        return replace(config, rope_scaling=replace(scaling, **changes))

    return change


def field(**changes: object) -> Callable[[LlamaConfig], LlamaConfig]:
    return lambda config: replace(config, **changes)


PERTURBATIONS = {
    "llama-gqa": {
        "rms_norm_eps": field(rms_norm_eps=2e-3),
        "rope_theta": field(rope_theta=110.0),
        "rope_scaling": field(rope_scaling=None),
        "kind": rope(kind="linear"),
        "factor": rope(factor=7.0),
        "low_freq_factor": rope(low_freq_factor=0.6),
        "high_freq_factor": rope(high_freq_factor=2.2),
        "original_context_len": rope(original_context_len=17),
    },
    "llama-tied-bias": {
        "rope_theta": field(rope_theta=11_000.0),
    },
    "llama-linear": {
        "rope_theta": field(rope_theta=550.0),
        "rope_scaling": field(rope_scaling=None),
        "factor": rope(factor=2.4),
    },
    "llama-yarn": {
        "rope_theta": field(rope_theta=11_000.0),
        "rope_scaling": field(rope_scaling=None),
        "kind": rope(kind="linear"),
        "factor": rope(factor=3.9),
        "original_context_len": rope(original_context_len=2048),
        "beta_fast": rope(beta_fast=16.0),
        "beta_slow": rope(beta_slow=2.0),
        "attention_factor": rope(attention_factor=1.0),
        "truncate": rope(truncate=False),
    },
    "llama-yarn-explicit": {
        "rope_theta": field(rope_theta=110.0),
        "factor": rope(factor=3.9),
        "original_context_len": rope(original_context_len=17),
        "beta_fast": rope(beta_fast=1.9),
        "beta_slow": rope(beta_slow=0.26),
        "attention_factor": rope(attention_factor=None),
        "truncate": rope(truncate=True),
    },
    "mistral-window": {
        "rope_theta": field(rope_theta=1100.0),
        "sliding_window_shorter": field(sliding_window=6),
        "sliding_window_longer": field(sliding_window=8),
        "sliding_window_none": field(sliding_window=None),
    },
    "qwen2": {
        "rope_theta": field(rope_theta=1100.0),
    },
    "qwen3": {
        "rms_norm_eps": field(rms_norm_eps=2e-3),
        "rope_theta": field(rope_theta=11_000.0),
    },
    "llama-sharded": {
        "rope_theta": field(rope_theta=11_000.0),
    },
}


@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name in PERTURBATIONS for what in PERTURBATIONS[name]]
)
def test_a_config_that_is_read_wrongly_shows_in_the_logits(name, what):
    ids, expected = reference(name)
    model = load(name)
    other = with_config(model, PERTURBATIONS[name][what](model.config))
    # Far beyond the tolerance, or the comparison above would not be able to tell.
    assert np.abs(run(other, ids) - expected).max() > 20 * TOLERANCE


@pytest.mark.parametrize("name", ["llama-tied-bias", "qwen3"])
def test_every_parameter_shows_in_the_logits(name):
    ids, expected = reference(name)
    graphdef, state = nnx.split(load(name))
    leaves, treedef = jax.tree.flatten(state)
    for i, leaf in enumerate(leaves):
        changed = [*leaves[:i], leaf * 1.1, *leaves[i + 1 :]]
        logits = run(nnx.merge(graphdef, jax.tree.unflatten(treedef, changed)), ids)
        assert np.abs(logits - expected).max() > 20 * TOLERANCE
