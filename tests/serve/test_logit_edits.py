"""Bias, min tokens and penalties: what they do to logits, and the same tokens in any batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import Engine, InvalidRequest, SamplingParams
from octavo.serve.logit_edits import edit_logits
from octavo.serve.seats import SeatParams, no_params

from .tiny import tiny_engine

V, W = 40, 24


def edits_of(biases: dict[int, float], bans: set[int], min_tokens: int) -> list:
    forever = np.iinfo(np.int32).max
    return [(t, v, forever) for t, v in biases.items()] + [(t, -np.inf, min_tokens) for t in bans]


def make_params(rng: np.random.Generator, num_seats: int) -> tuple[SeatParams, list[dict]]:
    """Parameters of each seat, every other one of which asks for nothing, and in plain Python."""
    plain, rows = [], []
    for seat in range(num_seats):
        row = no_params()
        ask = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, "edits": [], "prompt": 7}
        if seat % 2:
            ask["repetition"], ask["presence"], ask["frequency"] = rng.uniform(0.5, 2, 3).tolist()
            biases = {int(t): float(rng.normal()) for t in rng.choice(V, 5, replace=False)}
            ask["edits"] = edits_of(biases, {1, 2}, int(rng.integers(1, 6)))
        for i, (token, value, until) in enumerate(ask["edits"]):
            row.edit_ids[i], row.edit_values[i], row.edit_until[i] = token, value, until
        values = (ask["repetition"], ask["presence"], ask["frequency"])
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        fields = {name: np.float32(v) for name, v in zip(names, values, strict=True)}
        fields |= {"num_prompt": np.int32(7), "num_edits": np.int32(len(ask["edits"]))}
        rows.append(SeatParams(**{**vars(row), **fields}))
        plain.append(ask)
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *rows), plain


def edited(logits: np.ndarray, tokens: np.ndarray, num_tokens: int, ask: dict) -> np.ndarray:
    """The same for one row, one token after the other."""
    out = logits.astype(np.float64)
    prompt, text = tokens[: ask["prompt"]], tokens[ask["prompt"] : num_tokens]
    for token, value, until in ask["edits"]:
        if len(text) < until:
            out[token] += value
    for token in set(prompt.tolist()) | set(text.tolist()):
        out[token] *= ask["repetition"] if out[token] <= 0 else 1 / ask["repetition"]
    for token in text.tolist():
        out[token] -= ask["frequency"]
    for token in set(text.tolist()):
        out[token] -= ask["presence"]
    return out


@pytest.mark.parametrize("num_tokens", [7, 8, 12, W])
def test_logits_change_as_defined_and_only_where_asked(num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    params, plain = make_params(rng, 6)
    # Tokens past the end are somebody else's, and may be anything.
    history = rng.integers(0, V, (6, W)).astype(np.int32)
    logits = rng.normal(size=(4, V)).astype(np.float32) * 3
    seat = jnp.asarray([3, 0, 5, 1], jnp.int32)
    live = jnp.asarray([True, True, True, False])
    lens = jnp.full(4, num_tokens, jnp.int32)
    got = np.asarray(
        edit_logits(jnp.asarray(logits), jnp.asarray(history), params, seat, lens, live)
    )
    for row in range(3):
        want = edited(logits[row], history[seat[row]], num_tokens, plain[int(seat[row])])
        np.testing.assert_allclose(got[row], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1], logits[1])
    only_idle = edit_logits(
        jnp.asarray(logits), jnp.asarray(history), params, seat, lens, live & (seat == 0)
    )
    np.testing.assert_array_equal(only_idle, logits)


A, B = 1000, 2000


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel) -> Engine:
    return tiny_engine(tiny, max_num_seqs=4, max_num_batched_tokens=32)


def text(engine: Engine, prompt: list[int], count: int = 6, **params) -> list[int]:
    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)
    return list(engine.generate(prompt, asked)[0].token_ids)


def test_repetition_counts_the_prompt_and_the_others_do_not(engine: Engine) -> None:
    bias = {A: 50, B: 45}  # the model's own logits differ by less than 1
    prompt = [A] * 9
    assert text(engine, prompt, logit_bias=bias) == [A] * 6
    assert text(engine, prompt, logit_bias=bias, repetition_penalty=2.0)[:1] == [B]
    assert text(engine, [5], logit_bias=bias, repetition_penalty=2.0)[:2] == [A, B]
    assert text(engine, prompt, logit_bias=bias, presence_penalty=2.0) == [A] * 6
    assert text(engine, prompt, logit_bias=bias, frequency_penalty=2.0)[:4] == [A, A, A, B]
    assert text(engine, prompt, logit_bias=bias, frequency_penalty=-2.0) == [A] * 6


def test_nothing_ends_a_text_before_min_tokens(engine: Engine, tiny: LoadedModel) -> None:
    end = tiny.eos_token_ids[0]
    bias = {end: 100, A: 90, B: 80}

    def ends(**params) -> tuple[tuple[int, ...], str]:
        asked = SamplingParams(temperature=0, max_tokens=12, logit_bias=bias, **params)
        answer = engine.generate([1, 2, 3], asked)[0]
        return answer.token_ids, answer.finish_reason

    assert ends() == ((end,), "stop")
    assert ends(min_tokens=5) == ((A,) * 5 + (end,), "stop")
    assert ends(min_tokens=5, stop_token_ids=(A,)) == ((B,) * 5 + (end,), "stop")
    # Many stop tokens, of which the device checks eight: all of them are held off.
    many = (*range(3000, 3100), A)
    assert ends(min_tokens=3, stop_token_ids=many) == ((B,) * 3 + (end,), "stop")
    assert ends(min_tokens=12) == ((A,) * 12, "length")
    word = tiny.tokenizer.decode([A])
    assert ends(min_tokens=5, stop=(word,), ignore_eos=True)[0] == (end,) * 12
    bias = {A: 90}
    assert ends(stop=(word,)) == ((A,), "stop")
    assert ends(min_tokens=5, stop=(word,)) == ((A,) * 6, "stop")


def mixed_params() -> list[SamplingParams]:
    asked = [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "temperature": 0.9, "seed": 1},
        {},
        {"presence_penalty": -1.5, "logit_bias": {A: 4.0, B: 3.5}, "temperature": 1.0, "seed": 2},
        {"repetition_penalty": 0.7, "frequency_penalty": -0.3, "temperature": 0.5, "seed": 3},
        {"min_tokens": 20, "stop_token_ids": tuple(range(0, 2000, 10)), "seed": 4},
    ]
    base = {"temperature": 0, "max_tokens": 50}
    return [SamplingParams(**(base | own)) for own in asked]  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_edited_texts_are_the_same_in_any_batch_loop_and_pool(
    tiny: LoadedModel, engine: Engine
) -> None:
    params = mixed_params()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 3000, 20 + 9 * i).tolist() for i in range(len(params))]
    # One step per dispatch, and a pool that is too small for all of them.
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
    tight = tiny_engine(tiny, num_blocks=25, decode_slice_ms=1e-3, **sizes)
    alone = [tight.generate(p, own)[0].token_ids for p, own in zip(prompts, params, strict=True)]
    assert tight.stats().num_preemptions == 0
    assert [a.token_ids for a in engine.generate(prompts, params)] == alone
    assert [a.token_ids for a in tight.generate(prompts, params)] == alone
    assert tight.stats().num_preemptions > 0
    plain = SamplingParams(temperature=0, max_tokens=50)
    assert tight.generate(prompts[0], plain)[0].token_ids != alone[0]


BAD = [
    ({"min_tokens": 600}, "min_tokens"),
    ({"min_tokens": 2, "stop_token_ids": tuple(range(300))}, "min_tokens"),
    ({"logit_bias": {49152: 1.0}}, "logit_bias"),
]


@pytest.mark.parametrize(("params", "param"), BAD)
def test_what_the_model_cannot_do_is_refused_by_name(
    engine: Engine, params: dict, param: str
) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        engine.add_request([1], SamplingParams(**params))
    assert caught.value.param == param
    assert engine.num_unfinished == 0
