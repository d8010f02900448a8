"""Products of bfloat16 in Numba, summed up in float32: some CPUs do two at a time.

A *pair* is a 4-byte word of two bfloat16, the first in its lower half, as they lie in memory. Where
a `Vector` holds pairs in place of its numbers, nothing but these functions computes with it.

Import this module only where Numba is installed.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from .vectors import FLOAT, INT32, Vector, call_vector, is_address, splat_lanes
from .xla_ffi import intrinsic

# What Numba does not need for itself, and instructions by name do.
llvm.initialize_native_asmparser()

_LANES = 16  # of the instruction's vectors
_UPPER, _QUIET = 0xFFFF0000, 0x00400000


def has_pair_products() -> bool:
    """Whether this CPU has the instruction (AVX-512 BF16)."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512f") and features.get("avx512bf16"))


@intrinsic
def add_pairs(typing_context, total, address, pairs):
    """`total` and, pair by pair, both products of a vector's with the pair at an address."""
    if not is_address(address):
        return None
    width = total.width

    def generate(context, builder, signature, args):
        word = builder.load(builder.inttoptr(args[1], INT32.as_pointer()), align=4)
        if not has_pair_products():
            return _add_without(builder, args[0], splat_lanes(builder, word, width, INT32), args[2])
        own = splat_lanes(builder, word, _LANES, INT32)
        own = builder.bitcast(own, ir.VectorType(FLOAT, _LANES))
        kind = ir.FunctionType(own.type, [own.type] * 3)
        parts = []
        for first in range(0, width, _LANES):
            total, pairs = (_lanes(builder, x, first, _LANES) for x in (args[0], args[2]))
            # Not LLVM's intrinsic, whose types change from version to version.
            args_of_it = [total, own, pairs]
            parts.append(builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", args_of_it, False))
        return _lanes(builder, _joined(builder, parts), 0, width)

    return total(total, types.int64, pairs), generate


def _add_without(builder, total, own, pairs):
    """What the instruction does, in others that every CPU has: the upper halves come first."""
    pairs = builder.bitcast(pairs, own.type)
    shift, mask = (ir.Constant(own.type, [n] * own.type.count) for n in (16, _UPPER))
    for is_upper in (True, False):
        a, b = (builder.and_(x, mask) if is_upper else builder.shl(x, shift) for x in (own, pairs))
        a, b = (builder.bitcast(x, total.type) for x in (a, b))
        total = call_vector(builder, "fma", a, b, total)
    return total


@intrinsic
def pairs_of(typing_context, first, second):
    """The numbers of two vectors side by side, each rounded to the nearest bfloat16.

    Subnormal ones may become 0, as which the products count them.
    """

    def generate(context, builder, signature, args):
        return _pairs(builder, *args)

    return first(first, first), generate


@intrinsic
def neighbours(typing_context, address, width):
    """The `2 * width` numbers at an address as `width` pairs, each number rounded."""
    if not isinstance(width, types.IntegerLiteral) or not is_address(address):
        return None
    count = width.literal_value

    def generate(context, builder, signature, args):
        kind = ir.VectorType(FLOAT, 2 * count)
        numbers = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=4)
        return _pairs(builder, *(_lanes(builder, numbers, first, count, 2) for first in (0, 1)))

    return Vector(count)(types.int64, width), generate


@intrinsic
def load_across(typing_context, first, second, width):
    """Pairs of the `width` bfloat16 at one address with those at another one."""
    addresses_only = is_address(first) and is_address(second)
    if not isinstance(width, types.IntegerLiteral) or not addresses_only:
        return None
    count = width.literal_value

    def generate(context, builder, signature, args):
        kind, whole = (ir.VectorType(bits, count) for bits in (ir.IntType(16), INT32))
        low, high = (
            builder.zext(builder.load(builder.inttoptr(address, kind.as_pointer()), align=2), whole)
            for address in args[:2]
        )
        pairs = builder.or_(low, builder.shl(high, ir.Constant(whole, [16] * count)))
        return builder.bitcast(pairs, ir.VectorType(FLOAT, count))

    return Vector(count)(types.int64, types.int64, width), generate


def _pairs(builder, first, second):
    width = first.type.count
    if has_pair_products() and width % _LANES == 0:
        halves = [
            (_lanes(builder, first, begin, _LANES), _lanes(builder, second, begin, _LANES))
            for begin in range(0, width, _LANES)
        ]
        return _joined(builder, [_rounded_pairs(builder, *both) for both in halves])
    low, high = _rounded(builder, first), _rounded(builder, second)
    kind = low.type
    low = builder.lshr(low, ir.Constant(kind, [16] * kind.count))
    high = builder.and_(high, ir.Constant(kind, [_UPPER] * kind.count))
    return builder.bitcast(builder.or_(low, high), first.type)


def _rounded_pairs(builder, first, second):
    """What `_pairs` returns, by an instruction that puts all of `second` behind all of `first`."""
    half = ir.VectorType(ir.IntType(16), 2 * _LANES)
    kind = ir.FunctionType(half, [first.type] * 2)
    rounded = builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [first, second], False)
    lanes = [i // 2 + _LANES * (i % 2) for i in range(2 * _LANES)]
    mask = ir.Constant(ir.VectorType(INT32, 2 * _LANES), lanes)
    pairs = builder.shuffle_vector(rounded, ir.Constant(half, ir.Undefined), mask)
    return builder.bitcast(pairs, first.type)


def _rounded(builder, numbers):
    """Float32 as whole numbers, whose upper halves are the nearest bfloat16, even ones at ties."""
    kind = ir.VectorType(INT32, numbers.type.count)

    def constant(number: int):
        return ir.Constant(kind, [number] * kind.count)

    bits = builder.bitcast(numbers, kind)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    nearest = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    # What is not a number might round to one, or to infinity.
    is_number = builder.fcmp_ordered("ord", numbers, numbers)
    return builder.select(is_number, nearest, builder.or_(bits, constant(_QUIET)))


def _lanes(builder, vector, first: int, count: int, step: int = 1):
    """`count` lanes of a vector; any of its lanes where it has no more."""
    last = vector.type.count - 1
    lanes = [min(first + i * step, last) for i in range(count)]
    mask = ir.Constant(ir.VectorType(INT32, count), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _joined(builder, parts):
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        mask = ir.Constant(ir.VectorType(INT32, size), list(range(size)))
        parts = [
            builder.shuffle_vector(a, b, mask) for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]
