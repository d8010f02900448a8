"""An engine on int8 weights: what holds on whole ones holds on them, and on int8 activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from perplexity import compare
from typer.testing import CliRunner

from octavo.models import LoadedModel, load_model
from octavo.models.lora import LoraStack
from octavo.models.quantized import QuantizedWeight
from octavo.serve import Completion, SamplingParams, cli, lifecycle

from .tiny import RANK, lora_engine, tiny_adapter, tiny_engine, tiny_model

REFERENCE = np.load(Path(__file__).parents[1] / "data" / "smollm2_reference.npz")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SCORED = replace(GREEDY, logprobs=20)
# Few programs.
SIZES = {"num_blocks": 48, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def quantized(loaded: LoadedModel, quantization: str) -> LoadedModel:
    return replace(
        loaded,
        model=loaded.model.quantized(quantization),
        quantization=quantization,
        fingerprint=f"{loaded.fingerprint} in {quantization}",
    )


@pytest.fixture(scope="module")
def whole(smollm2: LoadedModel) -> LoadedModel:
    return tiny_model(smollm2)


@pytest.fixture(scope="module")
def tiny(whole: LoadedModel) -> LoadedModel:
    return quantized(whole, "int8")


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    shared = rng.integers(1000, 40000, 21).tolist()
    return [[*shared, *rng.integers(1000, 40000, 3 + 9 * i).tolist()] for i in range(3)]


def bits(answers: list[Completion]) -> list[tuple]:
    return [
        (a.token_ids, [{token: x.logprob for token, x in top.items()} for top in a.logprobs or ()])
        for a in answers
    ]


@pytest.mark.slow
def test_what_is_found_is_what_would_be_computed(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, deterministic=True, decode_slice_ms=1e6, **SIZES)
    miss = []
    for prompt in prompts():
        engine.reset_cache()
        miss += bits([engine.generate(prompt, SCORED)[0]])
    engine.reset_cache()
    assert bits(engine.generate(prompts(), SCORED)) == miss  # together, sharing
    again = engine.generate(prompts(), SCORED)
    assert bits(again) == miss  # hits
    assert all(a.num_cached_tokens >= a.num_prompt_tokens - 1 for a in again)
    engine.check_invariants()


@pytest.mark.slow
def test_where_activations_are_rounded_every_bit_is_the_same_unasked(whole: LoadedModel) -> None:
    engine = tiny_engine(quantized(whole, "w8a8"), decode_slice_ms=1e6, **SIZES)
    assert engine.config.deterministic
    miss = []
    for prompt in prompts():
        engine.reset_cache()
        miss += bits([engine.generate(prompt, SCORED)[0]])
    engine.reset_cache()
    for _ in range(2):  # together and sharing; hits
        assert bits(engine.generate(prompts(), SCORED)) == miss
    engine.check_invariants()


def test_greedy_answers_do_not_depend_on_the_cache_or_the_batch(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, **SIZES)
    alone = []
    for prompt in prompts():
        engine.reset_cache()
        alone.append(engine.generate(prompt, GREEDY)[0].token_ids)
    for _ in range(2):
        assert [a.token_ids for a in engine.generate(prompts(), GREEDY)] == alone


@pytest.mark.slow
def test_adapters_work_on_top(tiny: LoadedModel) -> None:
    engine = lora_engine(tiny)
    adapter = tiny_adapter(tiny.config, seed=1)
    engine.load_adapter("poet", adapter)
    prompt = prompts()[0]
    found = engine.generate(prompt, GREEDY, adapter="poet")[0].token_ids

    graphdef, state = nnx.split(tiny.model)

    @jax.jit
    def logits(state: nnx.State, tokens: jax.Array, stack: LoraStack) -> jax.Array:
        return nnx.merge(graphdef, state).sequence_logits(tokens, stack)

    stack = jax.tree.map(jnp.asarray, adapter.stack(rank=RANK, dtype=jnp.float32))
    rows = logits(state, jnp.array([*prompt, *found[:-1]]), stack)
    assert rows[len(prompt) - 1 :].argmax(axis=-1).tolist() == list(found)
    assert engine.generate(prompt, GREEDY)[0].token_ids != found


def test_new_weights_must_be_kept_as_the_old_ones_are(
    tiny: LoadedModel, whole: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(tiny, **SIZES)
    with pytest.raises(ValueError, match="another architecture or data type"):
        engine.load_weights(whole)
    assert engine.loaded.fingerprint == tiny.fingerprint
    read = []

    def load(path: str, *, quantization: str | None) -> LoadedModel:
        read.append((path, quantization))
        return replace(tiny, name=path)

    monkeypatch.setattr(lifecycle, "load_model", load)
    engine.load_weights("newer")
    assert read == [("newer", "int8")] and engine.loaded.name == "newer"


@pytest.mark.parametrize("command", [["serve", "m", "--port", "0"], ["generate", "m", "text"]])
def test_the_command_line_takes_it(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, *, quantization: str | None, progress: object) -> LoadedModel:
        raise ValueError(f"asked for {path} in {quantization}")

    monkeypatch.setattr(cli, "load_model", load)
    for options, code, words in (
        (["--quantization", "int8"], 1, "asked for m in int8"),
        (["-q", "w8a8"], 1, "asked for m in w8a8"),
        ([], 1, "asked for m in None"),
        (["--quantization", "int4"], 2, "int4"),
    ):
        result = CliRunner().invoke(cli.app, [*command, *options], env={"COLUMNS": "200"})
        assert (result.exit_code, words in result.stderr) == (code, True), result.stderr


def test_the_benchmark_measures_what_quantising_costs(
    tiny: LoadedModel, whole: LoadedModel
) -> None:
    windows = np.random.default_rng(3).integers(1000, 40000, (2, 9)).astype(np.int32)
    same, other = compare(whole, whole, windows), compare(whole, tiny, windows)
    assert same["num_scored_tokens"] == 16
    assert (same["log_ratio"], same["top_1_agreement"], same["mean_divergence_nats"]) == (0, 1, 0)
    assert other["perplexity_float32"] == same["perplexity_float32"]
    ratio = other["perplexity_quantized"] / other["perplexity_float32"]
    assert other["log_ratio"] == pytest.approx(np.log(ratio), abs=1e-12)
    assert 0 < other["mean_divergence_nats"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_the_demo_model_chooses_as_it_does_in_float32(quantization: str) -> None:
    loaded = load_model("smollm2", quantization=quantization)
    assert isinstance(loaded.model.embed.get_value(), QuantizedWeight)
    graphdef, state = nnx.split(loaded.model)

    @jax.jit
    def logits_of(state: nnx.State, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state).sequence_logits(tokens)

    logits = np.asarray(logits_of(state, jnp.asarray(REFERENCE["ids_300"])))
    assert (logits.argmax(axis=1) == REFERENCE["argmax_300"]).mean() > 0.93
    off = np.abs(logits[-1] - REFERENCE["logits_last_300"])
    assert 1e-3 < off.max() < 1
