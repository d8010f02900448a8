"""Vectors of float32 in Numba, as wide as wanted: what loops over arrays leave to luck.

A `Vector` lives in registers, as many as its width takes (64 numbers: four of AVX-512); what is
done with it is done with each of its numbers. It is a value inside one compiled function: pass
addresses from one to another.

Import this module only where Numba is installed.
"""

from __future__ import annotations

import math
import operator

import llvmlite.binding as llvm
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from .xla_ffi import intrinsic

FLOAT, INT32 = ir.FloatType(), ir.IntType(32)
_FLAGS = ("contract", "nsz", "arcp")
# What numbers below it have as their power of two: nothing.
_SMALLEST = -126.0
# 2**x for x in [-1/2, 1/2]: the Taylor series of exp(x ln 2), to 2e-7 of the value.
_SERIES = [math.log(2) ** n / math.factorial(n) for n in (6, 5, 4, 3, 2, 1)]


def widest() -> int:
    """Numbers of the widest vector of which five, and four numbers, fit this CPU's registers."""
    return 64 if llvm.get_host_cpu_features().get("avx512f") else 16


class Vector(types.Type):
    """`width` numbers of float32."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(name=f"Vector({width})")


@extending.register_model(Vector)
class _VectorModel(extending.models.PrimitiveModel):
    def __init__(self, data_model_manager, vector) -> None:
        super().__init__(data_model_manager, vector, ir.VectorType(FLOAT, vector.width))


def is_address(number: types.Type) -> bool:
    """Whether it is no float, which what is unsigned and then signed becomes, and which is slow."""
    return isinstance(number, types.Integer)


def splat_lanes(builder, number, width: int, kind: ir.Type = FLOAT):
    """A vector of `width` times a number."""
    vector = ir.VectorType(kind, width)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, INT32(0))
    lanes = ir.Constant(ir.VectorType(INT32, width), [0] * width)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def _constant(number: float, width: int):
    return ir.Constant(ir.VectorType(FLOAT, width), [number] * width)


def call_vector(builder, name: str, *args):
    """One of LLVM's functions of vectors."""
    kind = ir.FunctionType(args[0].type, [arg.type for arg in args])
    suffix = f"v{args[0].type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.{suffix}")
    return builder.call(function, args, fastmath=_FLAGS)


@intrinsic
def load(typing_context, address, width):
    """The `width` numbers at an address; `width` is a constant."""
    if not isinstance(width, types.IntegerLiteral) or not is_address(address):
        return None
    vector = Vector(width.literal_value)

    def generate(context, builder, signature, args):
        kind = context.get_value_type(vector)
        return builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=4)

    return vector(types.int64, width), generate


@intrinsic
def load_bytes(typing_context, address, place, width):
    """Signed byte `place` of each of the `width` 4-byte words at an address, as numbers."""
    literals = (place, width)
    if not all(isinstance(x, types.IntegerLiteral) for x in literals) or not is_address(address):
        return None
    left = 24 - 8 * place.literal_value

    def generate(context, builder, signature, args):
        kind = ir.VectorType(INT32, width.literal_value)
        words = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=4)
        words = builder.shl(words, ir.Constant(kind, [left] * kind.count))
        words = builder.ashr(words, ir.Constant(kind, [24] * kind.count))
        return builder.sitofp(words, ir.VectorType(FLOAT, kind.count))

    return Vector(width.literal_value)(types.int64, place, width), generate


@intrinsic
def store(typing_context, address, vector):
    """Write to an address."""
    if not is_address(address):
        return None

    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, vector), generate


def _crossing(distance: int, size: int) -> list[ir.Constant]:
    """Of two rows, the squares on the diagonal, and those across it, as shuffles of both."""
    first, second = [], []
    for i in range(size):
        is_left = not i & distance
        first.append(i if is_left else size + i - distance)
        second.append(i + distance if is_left else size + i)
    return [ir.Constant(ir.VectorType(INT32, size), lanes) for lanes in (first, second)]


@intrinsic
def transpose_square(typing_context, source, row, target, line, size):
    """Write a square, whose rows begin `row` bytes apart, by columns, `line` bytes apart.

    `size`, its numbers in a row, is a constant and a power of two.
    """
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def generate(context, builder, signature, args):
        kind = ir.VectorType(FLOAT, count)

        def place(base, step, i: int):
            address = builder.add(base, builder.mul(step, ir.IntType(64)(i)))
            return builder.inttoptr(address, kind.as_pointer())

        rows = [builder.load(place(args[0], args[1], i), align=4) for i in range(count)]
        distance = 1
        while distance < count:
            # Of each pair of rows, swap the squares that lie across the diagonal.
            masks = _crossing(distance, count)
            for i in range(count):
                if not i & distance:
                    pair = rows[i], rows[i + distance]
                    rows[i], rows[i + distance] = (
                        builder.shuffle_vector(*pair, mask) for mask in masks
                    )
            distance *= 2
        for i, column in enumerate(rows):
            builder.store(column, place(args[2], args[3], i), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, size), generate


@intrinsic
def splat(typing_context, number, width):
    """A vector of `width` times the same number; `width` is a constant."""
    if not isinstance(width, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, args):
        return splat_lanes(builder, args[0], width.literal_value)

    return Vector(width.literal_value)(types.float32, width), generate


@intrinsic
def add_product(typing_context, total, address, vector):
    """`total` and the product of a vector with the float32 at an address, rounded once."""
    if not is_address(address):
        return None

    def generate(context, builder, signature, args):
        number = builder.load(builder.inttoptr(args[1], FLOAT.as_pointer()))
        factor = splat_lanes(builder, number, vector.width)
        return call_vector(builder, "fma", factor, args[2], args[0])

    return vector(vector, types.int64, vector), generate


@intrinsic
def add_products(typing_context, total, a, b):
    """`total` and the products of two vectors, place by place, rounded once."""

    def generate(context, builder, signature, args):
        return call_vector(builder, "fma", args[1], args[2], args[0])

    return a(a, a, a), generate


@intrinsic
def larger(typing_context, a, b):
    """The larger number of two vectors, place by place."""

    def generate(context, builder, signature, args):
        is_larger = builder.fcmp_ordered(">", args[0], args[1])
        return builder.select(is_larger, args[0], args[1])

    return a(a, a), generate


@intrinsic
def largest_of(typing_context, vector):
    """The largest number of a vector."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(FLOAT, [args[0].type])
        name = f"llvm.vector.reduce.fmax.v{vector.width}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, args)

    return types.float32(vector), generate


@intrinsic
def sum_of(typing_context, vector):
    """The sum of a vector's numbers: of both its halves, place by place, and so on."""

    def generate(context, builder, signature, args):
        total, half = args[0], vector.width // 2
        while half:
            low, high = (
                builder.shuffle_vector(
                    total,
                    ir.Constant(total.type, ir.Undefined),
                    ir.Constant(ir.VectorType(INT32, half), list(range(first, first + half))),
                )
                for first in (0, half)
            )
            total, half = builder.fadd(low, high, flags=_FLAGS), half // 2
        return builder.extract_element(total, INT32(0))

    return types.float32(vector), generate


@intrinsic
def power_of_two(typing_context, exponent):
    """2**x of numbers up to 127; 0 of those below -126."""
    width = exponent.width

    def generate(context, builder, signature, args):
        smallest = _constant(_SMALLEST, width)
        # Not "is smaller": what is not a number is to stay so.
        vanishes = builder.fcmp_ordered("<", args[0], smallest)
        x = builder.select(vanishes, smallest, args[0])
        whole = call_vector(builder, "rint", x)
        x = builder.fsub(x, whole, flags=_FLAGS)
        power = _constant(_SERIES[0], width)
        for factor in (*_SERIES[1:], 1.0):
            power = call_vector(builder, "fma", power, x, _constant(factor, width))
        integers = ir.VectorType(INT32, width)
        shift = builder.shl(builder.fptosi(whole, integers), ir.Constant(integers, [23] * width))
        power = builder.add(builder.bitcast(power, integers), shift)
        power = builder.bitcast(power, ir.VectorType(FLOAT, width))
        return builder.select(vanishes, _constant(0.0, width), power)

    return exponent(exponent), generate


@intrinsic
def only_between(typing_context, vector, position, low, high):
    """The numbers where `low <= position <= high`, -inf elsewhere.

    `low` and `high` are addresses of as many int32; `position` is one.
    """
    width = vector.width

    def generate(context, builder, signature, args):
        kind = ir.VectorType(INT32, width)
        own = splat_lanes(builder, args[1], width, INT32)
        low, high = (
            builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)
            for address in args[2:]
        )
        seen = builder.and_(
            builder.icmp_signed(">=", own, low), builder.icmp_signed("<=", own, high)
        )
        return builder.select(seen, args[0], _constant(-math.inf, width))

    return vector(vector, types.int32, types.int64, types.int64), generate


def _operator(function, name: str) -> None:
    @intrinsic
    def apply(typing_context, a, b):
        def generate(context, builder, signature, args):
            return getattr(builder, name)(*args, flags=_FLAGS)

        return a(a, a), generate

    @extending.overload(function)
    def typed(a, b):
        if isinstance(a, Vector) and a == b:

            def compute(a, b):
                return apply(a, b)

            compute.__qualname__ += f"[{name}]"  # see `compiled_for`
            return compute
        return None


for _function, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _operator(_function, _name)
