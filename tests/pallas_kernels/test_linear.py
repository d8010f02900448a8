"""`linear`: products of float32 and int8 numbers, against float64; and the promises about bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels import PackedWeight, linear, pack_weight
from octavo.pallas_kernels.linear import numba as numba_op
from octavo.pallas_kernels.linear.packed import rounded_rows

IMPLEMENTATIONS = ("numba", "xla", "reference")
# (in, out): one panel in part; whole ones; some and a rest; whole pieces and groups, or not.
SHAPES = ((48, 20), (64, 32), (576, 960), (1000, 256), (600, 1009), (1, 1), (33, 65))
ROWS = (1, 2, 3, 4, 7, 8, 13, 20)
# Each is compiled anew: where code does not differ by rows, a few will do.
ROWS_OF: dict[str | None, tuple[int, ...]] = {"numba": ROWS, "xla": (1, 2, 7, 20)}
# Of the weight, and whether the activations are rounded too.
KINDS = {"float32": (False, False), "int8": (True, False), "w8a8": (True, True)}
each_kind = pytest.mark.parametrize(("int8", "quantize_x"), KINDS.values(), ids=KINDS)


def problem(num_rows: int, num_inputs: int, num_outputs: int, int8: bool) -> tuple:
    """(x, weight, scale), and what the product is in float64."""
    rng = np.random.default_rng([num_rows, num_inputs, num_outputs])
    x = rng.standard_normal((num_rows, num_inputs)).astype(np.float32)
    if not int8:
        weight = rng.standard_normal((num_inputs, num_outputs)).astype(np.float32)
        return (x, weight, None), x.astype(np.float64) @ weight
    groups = -(-num_inputs // 32)
    numbers = rng.integers(-127, 128, (groups, 8, 4, num_outputs)).astype(np.int8)
    scale = rng.uniform(1e-3, 2e-2, (groups, num_outputs)).astype(np.float32)
    words = np.ascontiguousarray(numbers.transpose(1, 0, 3, 2)).view("<i4")[..., 0]
    return (x, words, scale), x @ unpacked(words, scale)[:num_inputs]


def unpacked(words: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`float64[32*G, out]`, by bytes as a file would hold them."""
    numbers = np.ascontiguousarray(words.transpose(1, 0, 2))[..., None].view("<i1")
    numbers = numbers.swapaxes(2, 3).astype(np.float64)  # [G, J, 4, out]
    return (numbers * scale[:, None, None].astype(np.float64)).reshape(-1, words.shape[-1])


def run(args: tuple, *, packed: bool = False, **options) -> np.ndarray:
    own: list[Any] = [None if a is None else jnp.asarray(a) for a in args]
    if packed:
        num_inputs = None if args[2] is None else args[0].shape[1]
        own[1:] = pack_weight(*args[1:], num_inputs=num_inputs), None
    return np.asarray(jax.jit(lambda *own: linear(*own, **options))(*own))


@each_kind
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(
    ("implementation", "packed"),
    [
        *((name, True) for name in (*IMPLEMENTATIONS, None)),
        *((name, False) for name in ("xla", "reference", None)),
    ],
    ids=lambda value: {True: "packed", False: "plain"}.get(value, str(value)),
)
def test_a_product_is_that_of_the_weight(
    implementation: str | None, packed: bool, shape: tuple[int, int], int8: bool, quantize_x: bool
) -> None:
    for num_rows in ROWS_OF.get(implementation, (1, 7)):
        args, expected = problem(num_rows, *shape, int8)
        if quantize_x:
            rounded = np.asarray(rounded_rows(jnp.asarray(args[0])), np.float64)
            expected = rounded @ unpacked(*args[1:])[: shape[0]]
        for batch_invariant in (False, True):
            options = {"batch_invariant": batch_invariant, "implementation": implementation}
            options["quantize_x"] = quantize_x
            y = run(args, packed=packed, **options)
            assert y.dtype == np.float32 and y.shape == expected.shape
            np.testing.assert_allclose(y, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", [(48, 40), (64, 32), (576, 970), (16, 33)])
@pytest.mark.parametrize("implementation", ["reference", "xla", None], ids=str)
def test_a_weight_may_have_its_outputs_first(
    implementation: str | None, shape: tuple[int, int]
) -> None:
    options = {"transposed": True, "implementation": implementation}
    for num_rows in ROWS:
        (x, weight, _), expected = problem(num_rows, *shape, False)
        args = (x, np.ascontiguousarray(weight.T), None)
        for batch_invariant in (False, True):
            y = run(args, batch_invariant=batch_invariant, **options)
            np.testing.assert_allclose(y, expected, atol=2e-4, rtol=0)


@each_kind
@pytest.mark.parametrize("implementation", ["numba", "xla", None], ids=str)
def test_batch_invariant_rows_have_the_bits_they_have_alone(
    implementation: str | None, int8: bool, quantize_x: bool
) -> None:
    args, _ = problem(37, 600, 1009, int8)
    options = {"batch_invariant": True, "implementation": implementation}
    options["quantize_x"] = quantize_x
    options["packed"] = implementation != "xla"
    together = run(args, **options)
    for rows in (slice(0, 1), slice(3, 20), slice(30, 37)):
        alone = run((args[0][rows], *args[1:]), **options)
        np.testing.assert_array_equal(alone, together[rows])


@each_kind
def test_more_rows_than_a_cache_holds_are_multiplied_in_tiles(int8: bool, quantize_x: bool) -> None:
    args, expected = problem(450, 600, 70, int8)
    options = {"packed": True, "implementation": "numba", "quantize_x": quantize_x}
    together = run(args, **options)
    if not quantize_x:
        np.testing.assert_allclose(together, expected, atol=2e-4, rtol=0)
    for rows in (slice(0, 1), slice(140, 180), slice(300, 450)):
        alone = run((args[0][rows], *args[1:]), **options)
        np.testing.assert_array_equal(alone, together[rows])


@each_kind
def test_no_bit_depends_on_the_number_of_threads(
    int8: bool, quantize_x: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, _ = problem(200, 576, 1009, int8)
    results = []
    for num_threads in (1, 2, 3, 64):
        monkeypatch.setattr(numba_op, "num_threads", lambda n=num_threads: n)
        options = {"implementation": "numba", "quantize_x": quantize_x}
        results.append(run(args, packed=True, **options))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_calls_from_many_threads_do_not_wait_for_one_another() -> None:
    args, _ = problem(20, 576, 960, False)
    product = jax.jit(lambda *own: linear(*own, implementation="numba"))
    own = [jnp.asarray(args[0]), pack_weight(jnp.asarray(args[1]))]
    want = np.asarray(product(*own))
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(lambda: np.asarray(product(*own))) for _ in range(200)]
        for call in calls:
            np.testing.assert_array_equal(call.result(timeout=60), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("nothing", [np.nan, np.inf, -np.inf])
@each_kind
def test_a_row_that_is_not_a_number_stays_with_itself(
    int8: bool, quantize_x: bool, nothing: float, implementation: str
) -> None:
    args, _ = problem(12, 64, 96, int8)
    options = {"packed": True, "implementation": implementation, "quantize_x": quantize_x}
    clean = run(args, **options)
    args[0][3, 40] = nothing
    spoilt = run(args, **options)
    assert not np.isfinite(spoilt[3]).any()
    np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("has_instruction", [False, True])
def test_products_of_bytes_are_summed_up_with_the_instruction_and_without_it(
    has_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    from octavo.pallas_kernels import vectors, vectors_int8

    if has_instruction and not vectors_int8.has_dot_products():
        pytest.skip("this CPU has no AVX-512 VNNI")
    monkeypatch.setattr(vectors_int8, "has_dot_products", lambda: has_instruction)

    @numba.njit
    def dots(offset, weights, x, out):
        total = vectors_int8.splat_word(np.int64(offset.ctypes.data))
        unsigned = vectors_int8.load_unsigned(np.int64(weights.ctypes.data))
        signed = vectors_int8.splat_word(np.int64(x.ctypes.data))
        total = vectors_int8.add_dots(total, unsigned, signed)
        vectors.store(np.int64(out.ctypes.data), vectors_int8.as_numbers(total))

    rng = np.random.default_rng(1)
    weights, x = rng.integers(-128, 128, (16, 4)), rng.integers(-128, 128, 4)
    out = np.zeros(16, np.float32)
    dots(np.array([-7], np.int32), weights.astype(np.int8), x.astype(np.int8), out)
    np.testing.assert_array_equal(out, (weights + 128) @ x - 7)


def test_rows_are_rounded_to_the_nearest_number_of_their_group() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 75)).astype(np.float32)  # the last group is of 11
    x[0, :32] = 0
    x[1, 3] = 1e6  # spoils its own group only
    x[2] *= 1e-37  # as nothing
    x[3] = rng.integers(-127, 128, 75)
    x[3, ::32] = 127  # what eight bits hold
    rounded = np.asarray(rounded_rows(jnp.asarray(x)))
    groups = np.pad(x, ((0, 0), (0, 21))).reshape(6, -1, 32)
    step = np.repeat(np.abs(groups).max(axis=-1) / 127, 32, axis=1)[:, :75]
    assert (np.abs(rounded - x) <= 0.5001 * step)[[0, 1, 3, 4, 5]].all()
    assert (rounded[2] == 0).all()
    np.testing.assert_array_equal(rounded[3], x[3])
    for value in (1.0, -1e-20):
        gradient = jax.grad(lambda x: rounded_rows(x).sum())(jnp.full((2, 33), value))
        np.testing.assert_array_equal(gradient, np.ones((2, 33)))


def test_a_cpu_without_the_instruction_rounds_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args, _ = problem(5, 600, 70, True)
    options = {"packed": True, "implementation": "numba", "quantize_x": True}
    ours = run(args, **options)
    monkeypatch.setattr(numba_op, "has_dot_products", lambda: False)
    other = run(args, **options)
    np.testing.assert_allclose(ours, other, atol=2e-4, rtol=0)


def test_cpus_take_the_kernel_for_packed_weights() -> None:
    for num_rows in (1, 2):
        x, weight = jnp.ones((num_rows, 64)), jnp.ones((64, 96))
        in_int8 = pack_weight(jnp.ones((8, 2, 96), jnp.int32), jnp.ones((2, 96)))
        for own, options, is_ours in (
            (pack_weight(weight), {}, True),
            (pack_weight(weight), {"batch_invariant": True}, True),
            (weight, {}, False),
            (weight.T, {"transposed": True}, False),
            (in_int8, {"quantize_x": True}, True),
        ):
            call = jax.jit(lambda x, own, options=options: linear(x, own, **options))
            assert ("octavo.linear" in call.lower(x, own).as_text()) == is_ours


def test_only_the_other_implementations_have_a_gradient() -> None:
    (x, weight, _), _ = problem(4, 48, 20, False)
    packed = pack_weight(jnp.asarray(weight))
    assert packed is not None

    def loss(x: jax.Array, implementation: str) -> jax.Array:
        return jnp.sum(linear(x, packed, implementation=implementation))

    np.testing.assert_allclose(
        jax.grad(loss)(jnp.asarray(x), "xla"), np.tile(weight.sum(1), (4, 1)), atol=1e-5
    )
    with pytest.raises(ValueError, match="differentiate"):
        jax.grad(loss)(jnp.asarray(x), "numba")


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("num_outputs", [20, 64, 1009])
def test_a_packed_weight_holds_what_it_was_made_of(num_outputs: int, int8: bool) -> None:
    (_, weight, scale), _ = problem(2, 48, num_outputs, int8)
    packed = pack_weight(weight, scale, num_inputs=48)
    assert isinstance(packed, PackedWeight) and packed.panels.dtype == weight.dtype
    for got, want in zip(packed.plain(), (weight, scale), strict=True):
        np.testing.assert_array_equal(got, want) if want is not None else None
    ids = jnp.asarray([num_outputs - 1, 0, 7, 0])
    rows = run((np.eye(48, dtype=np.float32), weight, scale), implementation="reference").T
    np.testing.assert_array_equal(packed.outputs(ids), rows[ids])


def test_nothing_times_something_is_nothing() -> None:
    assert linear(jnp.zeros((0, 4)), jnp.zeros((4, 5))).shape == (0, 5)
    np.testing.assert_array_equal(linear(jnp.zeros((2, 0)), jnp.zeros((0, 5))), np.zeros((2, 5)))


@pytest.mark.parametrize(
    ("weight", "scale", "num_inputs", "message"),
    [
        ((8,), None, None, r"must be \[in, out\]"),
        ((8, 5), None, 9, r"must be \[in, out\], in=9"),
        ((8, 2, 5), (2, 5), 31, r"must be \[8, 1, out\]"),
        ((8, 2), (2, 5), None, r"must be \[8, G, out\]"),
    ],
)
def test_what_makes_no_weight_is_not_packed(weight, scale, num_inputs, message: str) -> None:
    kind = jnp.float32 if scale is None else jnp.int32
    scale = None if scale is None else jnp.zeros(scale)
    with pytest.raises(ValueError, match=message):
        pack_weight(jnp.zeros(weight, kind), scale, num_inputs=num_inputs)


@pytest.mark.parametrize(
    ("x", "weight", "scale", "message"),
    [
        ((3, 4, 5), (4, 5), None, r"must be \[T, in\]"),
        ((3, 4), (5, 4), None, r"must be \[in, out\], in=4"),
        ((3, 40), (8, 1, 5), (1, 5), r"must be \[8, 2, out\]"),
        ((3, 40), (8, 2, 5), (2, 6), r"scale.shape=\(2, 6\) must be \(2, 5\)"),
    ],
)
def test_what_does_not_fit_together_is_refused(x, weight, scale, message: str) -> None:
    scale = None if scale is None else jnp.zeros(scale)
    kind = jnp.float32 if scale is None else jnp.int32
    with pytest.raises(ValueError, match=message):
        linear(jnp.zeros(x), jnp.zeros(weight, kind), scale)


def test_a_packed_weight_of_other_inputs_is_refused() -> None:
    packed = pack_weight(jnp.ones((8, 3)))
    assert packed is not None
    with pytest.raises(ValueError, match=r"must be \[T, 8\], None and False"):
        linear(jnp.ones((4, 9)), packed)


def test_what_the_kernel_cannot_do_is_refused_if_asked_for_and_done_by_xla_if_not() -> None:
    x, weight = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="must be float32"):
        linear(x, weight, implementation="numba")
    with pytest.raises(NotImplementedError, match="must be packed"):
        linear(jnp.ones((4, 8)), jnp.ones((8, 3)), implementation="numba")
    assert pack_weight(weight) is None
    assert linear(x, weight).dtype == jnp.bfloat16
    for implementation in (None, "reference"):
        y = linear(x, weight.T, transposed=True, implementation=implementation)
        assert y.dtype == jnp.float32
    with pytest.raises(NotImplementedError, match="must be packed"):
        linear(jnp.ones((4, 8)), jnp.ones((3, 8)), transposed=True, implementation="numba")
    with pytest.raises(ValueError, match="not for int8"):
        linear(jnp.ones((4, 8)), jnp.ones((8, 1, 3)), jnp.ones((1, 3)), transposed=True)
    with pytest.raises(ValueError, match="must be int32"):
        linear(jnp.ones((4, 8)), jnp.ones((8, 1, 3)), jnp.ones((1, 3)))
    packed = pack_weight(jnp.ones((8, 3)))
    assert packed is not None
    for own in (jnp.ones((8, 3)), packed):
        with pytest.raises(ValueError, match="quantize_x=True is for int8 weights"):
            linear(jnp.ones((4, 8)), own, quantize_x=True)
