"""Adapters: PEFT's own logits, the merged weights' numbers, files there and back, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.models import LlamaConfig, LoraAdapter, load_adapter, save_adapter
from octavo.models.lora import (
    FUSED,
    LoraStack,
    TokenSlots,
    _at_once,
    _in_a_loop,
    init_lora,
    lora_shapes,
    place_lora,
)
from octavo.models.weights import WeightsError, build_model

from .test_hf_reference import TOLERANCE, load, raw_config, run
from .test_weights import CONFIG, ArraySource, hf_shapes

HERE = Path(__file__).resolve().parent
BASES = {"all-rslora": "llama-gqa", "patterns": "llama-gqa"}
BASES |= {"one-layer": "qwen2", "regex": "llama-tied-bias"}


def adapter_of(name: str) -> LoraAdapter:
    return load_adapter(HERE / "lora" / name, LlamaConfig.from_hf(raw_config(BASES[name])))


def random_adapter(config: LlamaConfig, seed: int, rank: int = 3, scale: float = 0.3):
    rng = np.random.default_rng(seed)

    def factor(*shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def layer() -> dict[str, tuple[np.ndarray, np.ndarray]]:
        shapes = lora_shapes(config).items()
        return {t: (factor(n, rank), factor(rank, out)) for t, (n, out) in shapes}

    return LoraAdapter(config=config, layers=[layer() for _ in range(config.num_layers)])


def stack_of(adapters: list[LoraAdapter], rank: int = 4) -> LoraStack:
    stack = init_lora(adapters[0].config, num_slots=len(adapters), rank=rank, dtype=jnp.float32)
    for slot, adapter in enumerate(adapters):
        own = adapter.stack(rank=rank, dtype=jnp.float32)
        stack = place_lora(stack, own, jnp.int32(slot))
    return stack


# ---- numbers -------------------------------------------------------------------------------


def test_there_is_a_reference_for_every_adapter_and_the_other_way_round():
    with np.load(HERE / "lora_reference.npz") as arrays:
        assert {key.split("/")[0] for key in arrays} == BASES.keys()
    assert {path.name for path in (HERE / "lora").iterdir()} == BASES.keys()


@pytest.mark.parametrize("name", BASES)
def test_logits_are_those_of_peft(name):
    with np.load(HERE / "lora_reference.npz") as arrays:
        ids, expected = arrays[f"{name}/ids"], arrays[f"{name}/logits"]
    model, adapter = load(BASES[name]), adapter_of(name)
    stack = adapter.stack(rank=8, dtype=jnp.float32)
    np.testing.assert_allclose(
        run(model, ids, jax.tree.map(jnp.asarray, stack)),
        expected,
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )
    assert np.abs(run(model, ids) - expected).max() > 20 * TOLERANCE


def test_logits_are_those_of_the_merged_weights():
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) * 0.3
        for name, shape in hf_shapes(CONFIG).items()
    }
    adapter = random_adapter(CONFIG, seed=1)
    merged = dict(tensors)
    for i, layer in enumerate(adapter.layers):
        for target, (a, b) in layer.items():
            parent = "self_attn" if target[0] in "qkvo" else "mlp"
            merged[f"model.layers.{i}.{parent}.{target}.weight"] = (
                tensors[f"model.layers.{i}.{parent}.{target}.weight"] + (a @ b).T
            )
    ids = rng.integers(0, CONFIG.vocab_size, 40).astype(np.int32)
    stack = stack_of([adapter, random_adapter(CONFIG, seed=2)])
    got = run(build_model(CONFIG, ArraySource(tensors)), ids, stack)
    want = run(build_model(CONFIG, ArraySource(merged)), ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("product", [_at_once, _in_a_loop])
@pytest.mark.parametrize("name", FUSED)
def test_every_token_of_a_batch_takes_its_own_adapter(product, name):
    adapters = [random_adapter(CONFIG, seed) for seed in range(3)]
    # What would overflow for those who do not take it reaches nobody else.
    adapters[1].layers[1]["down_proj"][0][:] = 3e38
    stack = stack_of(adapters)
    width = stack[1][name].a.shape[0]
    x = np.random.default_rng(9).standard_normal((6, width)).astype(np.float32)
    slot = np.array([3, 0, 1, 3, 0, 1], np.int32)
    got = product(x, stack[1][name], TokenSlots.of(jnp.asarray(slot), 3))
    for target, delta in zip(FUSED[name], got, strict=True):
        for row in range(6):
            a, b = adapters[slot[row] - 1].layers[1][target]
            want = x[row] @ a @ b if slot[row] else np.zeros(b.shape[1])
            np.testing.assert_allclose(delta[row], want, rtol=1e-4, atol=1e-5)
            assert slot[row] or not np.asarray(delta[row]).any()


def test_the_slots_in_use_come_first():
    tokens = TokenSlots.of(jnp.asarray([4, 0, 2, 4], jnp.int32), 5)
    assert tokens.num_used == 2 and tokens.used[:2].tolist() == [1, 3]
    nobody = TokenSlots.of(jnp.zeros(3, jnp.int32), 5)
    assert nobody.num_used == 0


def test_training_changes_the_projections_that_it_began_with():
    rng = np.random.default_rng(0)
    shapes = hf_shapes(CONFIG).items()
    tensors = {name: 0.3 * rng.standard_normal(s).astype(np.float32) for name, s in shapes}
    model = build_model(CONFIG, ArraySource(tensors))
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, 9), jnp.int32)
    own = LoraAdapter.fresh(CONFIG, rank=3, targets=["q_proj", "gate_proj", "down_proj"])
    stack = jax.tree.map(jnp.asarray, own.stack(rank=3, dtype=jnp.float32))

    @jax.jit
    def loss(stack: LoraStack) -> jax.Array:
        scores = jax.nn.log_softmax(model.sequence_logits(tokens, stack))
        return -jnp.mean(jnp.take_along_axis(scores[:-1], tokens[1:, None], axis=-1))

    gradient = jax.jit(jax.grad(loss))
    losses = [float(loss(stack))]
    plain = jax.nn.log_softmax(model.sequence_logits(tokens))[jnp.arange(8), tokens[1:]]
    np.testing.assert_allclose(losses[0], -jnp.mean(plain), rtol=1e-6)
    for _ in range(10):
        stack = jax.tree.map(lambda w, g: w - 2 * g, stack, gradient(stack))
        losses.append(float(loss(stack)))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01, losses
    trained = LoraAdapter.from_stack(CONFIG, stack)
    assert all(layer.keys() == {"q_proj", "gate_proj", "down_proj"} for layer in trained.layers)


# ---- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASES)
def test_an_adapter_is_written_as_it_was_read(name, tmp_path):
    adapter = adapter_of(name)
    save_adapter(adapter, tmp_path)
    again = load_adapter(tmp_path, adapter.config)
    assert again.digest == adapter.digest
    assert again.rank == adapter.rank == {"all-rslora": 4, "patterns": 6}.get(name, again.rank)


def test_any_change_of_an_adapter_changes_its_digest():
    adapter = random_adapter(CONFIG, seed=0)
    seen = {adapter.digest}
    for layer in range(2):
        for target in lora_shapes(CONFIG):
            for factor in range(2):
                other = random_adapter(CONFIG, seed=0)
                other.layers[layer][target][factor][0, 0] += 1
                seen.add(other.digest)
            other = random_adapter(CONFIG, seed=0)
            del other.layers[layer][target]
            seen.add(other.digest)
    assert len(seen) == 1 + 2 * 7 * 3
    assert random_adapter(CONFIG, seed=0).digest == adapter.digest


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_tensors(change_fn: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change_fn(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return change


def only_a_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


Q = "base_model.model.model.layers.0.self_attn.q_proj."
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "dora": (with_config(use_dora=True), "use_dora=True is not supported"),
    "lora_bias": (with_config(lora_bias=True), "lora_bias=True is not supported"),
    "bias": (with_config(bias="all"), "bias='all' is not supported"),
    "saved": (with_config(modules_to_save=["lm_head"]), "modules_to_save="),
    "unheard of": (with_config(use_magic=[1]), r"use_magic=\[1\] is not supported"),
    "kind": (with_config(peft_type="IA3"), "peft_type='IA3' must be 'LORA'"),
    "head": (with_config(target_modules=["q_proj", "lm_head"]), "target_modules=.*lm_head.*among"),
    "no targets": (with_config(target_modules=None), "target_modules=None must be names"),
    "pissa": (with_config(init_lora_weights="pissa"), "'pissa' changes the base model"),
    "rank": (with_config(r=0), "r=0 must be a rank of at least 1"),
    "ranks": (with_config(rank_pattern={"q_proj": "4"}), "rank_pattern="),
    "alpha": (with_config(lora_alpha=float("nan")), "lora_alpha=nan must be a number"),
    "pattern": (with_config(alpha_pattern={"(": 1}), r"the pattern '\(': "),
    "other rank": (with_config(r=5), r"wrong shapes \(28\): .*q_proj.lora_A.weight is \(4, 32\)"),
    "fewer targets": (with_config(target_modules=["q_proj"]), r"not in target_modules \(12\)"),
    "lost": (with_tensors(lambda t: t.pop(Q + "lora_B.weight")), r"missing tensors \(1\): .*B"),
    "extra": (
        with_tensors(lambda t: t.update({Q + "lora_embedding_A": np.zeros(3, np.float32)})),
        r"unexpected tensors \(1\): .*lora_embedding_A \(3,\)",
    ),
    "integers": (
        with_tensors(lambda t: t.update({Q + "lora_A.weight": np.zeros((4, 32), np.int32)})),
        "not floating point .* is int32",
    ),
    "empty": (with_tensors(lambda t: t.clear()), "no tensors at all"),
    "pickle": (only_a_pickle, "is a pickle, which may run code"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "has neither adapter_mod"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_used_is_refused_by_name(what, tmp_path):
    folder = shutil.copytree(HERE / "lora" / "all-rslora", tmp_path / "adapter")
    change, message = REFUSED[what]
    change(folder)
    with pytest.raises(WeightsError, match=message):
        load_adapter(folder, LlamaConfig.from_hf(raw_config("llama-gqa")))


def test_an_adapter_of_another_model_is_refused_with_every_mismatch():
    with pytest.raises(WeightsError, match=r"wrong shapes \(.*and \d+ more") as error:
        load_adapter(HERE / "lora" / "all-rslora", CONFIG)
    assert "q_proj.lora_A.weight is (4, 32), expected (4, 12)" in str(error.value)


def test_all_that_a_config_asks_in_vain_is_said_at_once(tmp_path):
    folder = shutil.copytree(HERE / "lora" / "all-rslora", tmp_path / "adapter")
    with_config(use_dora=True, bias="all", r=0)(folder)
    with pytest.raises(WeightsError) as error:
        load_adapter(folder, LlamaConfig.from_hf(raw_config("llama-gqa")))
    assert all(word in str(error.value) for word in ("use_dora", "bias", "r=0"))


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (1e6, "float16")])
def test_values_that_are_not_finite_never_enter_a_batch(value, dtype):
    adapter = random_adapter(CONFIG, seed=0)
    adapter.layers[1]["v_proj"][1][0, 0] = value
    with pytest.raises(WeightsError, match=f"v_proj in layer 1 .*finite in {dtype}"):
        adapter.stack(rank=4, dtype=dtype)


def test_an_empty_adapter_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        save_adapter(LoraAdapter(config=CONFIG, layers=({}, {})), tmp_path)
