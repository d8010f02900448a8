"""8-bit caches on tensor cores: a 16-bit word of two stored numbers becomes two bfloat16 operands.

Tensor-core operands want two neighbouring numbers in one register, and shared memory can be read
transposed in units of 16 bits only. So a cache of 8-bit numbers is read as 16-bit words, and a
word's low and high bytes go to two operands of the same shape: the even and the odd positions of
a head. Q is split the same way before the kernel, and the output is interleaved after it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu


def e4m3_bits(word: Any, odd: bool) -> Any:
    """Two e4m3 numbers of a 32-bit word (its even or odd bytes) as bfloat16 bits, times 2**-120.

    The exponent's bias stays e4m3's, which costs nothing to undo in the softmax scale and in the
    output. Subnormals come out right too: they are subnormal on both sides.
    """
    if odd:
        return (word & 0x80008000) | ((word >> 4) & 0x07F007F0)
    return ((word << 8) & 0x80008000) | ((word << 4) & 0x07F007F0)


def int8_terms(word: Any, odd: bool) -> tuple[Any, Any]:
    """Bits of bfloat16 pairs (a, b) with a + b the even or odd int8 numbers of a 32-bit word.

    a is 128 plus the low seven bits, placed in the mantissa; b is -128, or -256 where the sign
    bit, placed in the exponent, says so.
    """
    if odd:
        word = word >> 8
    return (word & 0x007F007F) | 0x43004300, (word & 0x00800080) | 0xC300C300


def split_words(
    words: jax.Array, dtype: Any, layout: Any, *, interpreted: bool
) -> tuple[jax.Array, jax.Array]:
    """The low and the high bytes of `words: uint16[...]` as bfloat16.

    Numbers of an e4m3 cache come out times 2**-120, except when interpreted.
    """
    if not interpreted:
        return _split_on_device(words, dtype, layout)
    low, high = (words & 0xFF).astype(jnp.uint8), (words >> 8).astype(jnp.uint8)
    low, high = (jax.lax.bitcast_convert_type(x, dtype) for x in (low, high))
    return low.astype(jnp.bfloat16), high.astype(jnp.bfloat16)


def _split_on_device(words: jax.Array, dtype: Any, layout: Any) -> tuple[jax.Array, jax.Array]:
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir

    def split(_: Any, words: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        halves = []
        for odd in (False, True):
            registers = np.empty_like(words.registers)
            for index, register in np.ndenumerate(words.registers):
                word = _Word(mgpu.utils.bitcast(register, i32))
                if dtype == jnp.int8:
                    bits = _add_bf16_pairs(*int8_terms(word, odd))
                else:
                    bits = e4m3_bits(word, odd)
                registers[index] = mgpu.utils.bitcast(bits.value, pair)
            halves.append(
                mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)
            )
        return tuple(halves)

    operand = plgpu.ShapeDtypeStruct(words.shape, jnp.dtype(jnp.bfloat16), layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=(operand, operand))(split)
    return inlined(words)


class _Word:
    """A 32-bit register with Python's operators, so that a NumPy array can stand in its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _apply(self, op: str, other: _Word | int) -> _Word:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        if isinstance(other, int):
            signed = other - (1 << 32) if other >= 1 << 31 else other
            other = _Word(arith.constant(ir.IntegerType.get_signless(32), signed))
        return _Word(getattr(arith, op)(self.value, other.value))

    def __and__(self, other: _Word | int) -> _Word:
        return self._apply("andi", other)

    def __or__(self, other: _Word | int) -> _Word:
        return self._apply("ori", other)

    def __lshift__(self, other: int) -> _Word:
        return self._apply("shli", other)

    def __rshift__(self, other: int) -> _Word:
        return self._apply("shrui", other)


def _add_bf16_pairs(a: _Word, b: _Word) -> _Word:
    # As a fused multiply-add, because sm_80 has no other arithmetic on bfloat16 pairs.
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    one = a & 0 | 0x3F803F80
    i32 = ir.IntegerType.get_signless(32)
    total = llvm.inline_asm(
        i32,
        [a.value, one.value, b.value],
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        has_side_effects=False,
    )
    return _Word(total)
