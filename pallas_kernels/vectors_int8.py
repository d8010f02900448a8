"""Products of 8-bit numbers in Numba, summed up in 32 bits: a CPU does four at a time.

`Words` are 16 of int32, each with four numbers of 8 bits or a sum of products; like `Vector`, a
value inside one compiled function.

Import this module only where Numba is installed.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from .vectors import FLOAT, INT32, Vector, call_vector, is_address, splat_lanes
from .xla_ffi import intrinsic

# What Numba does not need for itself, and instructions by name do.
llvm.initialize_native_asmparser()

LANES = 16
_WORDS = ir.VectorType(INT32, LANES)


def has_dot_products() -> bool:
    """Whether this CPU has the instruction (AVX-512 VNNI)."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512f") and features.get("avx512vnni"))


class Words(types.Type):
    """Sixteen numbers of int32."""

    def __init__(self) -> None:
        super().__init__(name="Words")


words = Words()


@extending.register_model(Words)
class _WordsModel(extending.models.PrimitiveModel):
    def __init__(self, data_model_manager, kind) -> None:
        super().__init__(data_model_manager, kind, _WORDS)


@intrinsic
def load_unsigned(typing_context, address):
    """The words at an address, 128 added to each of their signed bytes."""
    if not is_address(address):
        return None

    def generate(context, builder, signature, args):
        loaded = builder.load(builder.inttoptr(args[0], _WORDS.as_pointer()), align=4)
        return builder.xor(loaded, ir.Constant(_WORDS, [0x80808080] * LANES))

    return words(types.int64), generate


@intrinsic
def splat_word(typing_context, address):
    """Sixteen times the int32 at an address."""
    if not is_address(address):
        return None

    def generate(context, builder, signature, args):
        word = builder.load(builder.inttoptr(args[0], INT32.as_pointer()), align=4)
        return splat_lanes(builder, word, LANES, INT32)

    return words(types.int64), generate


@intrinsic
def add_dots(typing_context, total, unsigned, signed):
    """`total` and, word by word, the four products of unsigned bytes with signed ones."""

    def generate(context, builder, signature, args):
        if not has_dot_products():  # it is compiled all the same, and never run
            return _dots_without(builder, *args)
        # Not LLVM's intrinsic, whose types change from version to version.
        kind = ir.FunctionType(_WORDS, [_WORDS] * 3)
        return builder.asm(kind, "vpdpbusd $3, $2, $0", "=v,0,v,v", args, False)

    return words(words, words, words), generate


def _dots_without(builder, total, unsigned, signed):
    """What the instruction does, in others that every CPU has."""
    for place in range(4):
        left, right = (ir.Constant(_WORDS, [n] * LANES) for n in (24 - 8 * place, 24))
        a = builder.lshr(builder.shl(unsigned, left), right)
        b = builder.ashr(builder.shl(signed, left), right)
        total = builder.add(total, builder.mul(a, b))
    return total


@intrinsic
def as_numbers(typing_context, whole):
    """Whole numbers as float32."""

    def generate(context, builder, signature, args):
        return builder.sitofp(args[0], ir.VectorType(FLOAT, LANES))

    return Vector(LANES)(words), generate


@intrinsic
def largest_magnitude(typing_context, vector):
    """The largest number of a vector without signs; not a number if one is none."""
    width = vector.width

    def generate(context, builder, signature, args):
        # As integers they have the same order, and what is not a number is above all.
        kind = ir.VectorType(INT32, width)
        magnitudes = builder.and_(
            builder.bitcast(args[0], kind), ir.Constant(kind, [0x7FFFFFFF] * width)
        )
        return builder.bitcast(_reduce(builder, "smax", magnitudes), FLOAT)

    return types.float32(vector), generate


@intrinsic
def store_rounded(typing_context, target, vector):
    """Write numbers from -127 to 127 as signed bytes, each rounded; returns their sum.

    What is not a number counts as 0.
    """
    width = vector.width
    if not is_address(target):
        return None

    def generate(context, builder, signature, args):
        kind, whole = ir.VectorType(ir.IntType(8), width), ir.VectorType(INT32, width)
        is_number = builder.fcmp_ordered("ord", args[1], args[1])
        numbers = builder.select(is_number, args[1], ir.Constant(args[1].type, [0.0] * width))
        numbers = builder.fptosi(call_vector(builder, "rint", numbers), whole)
        rounded = builder.trunc(numbers, kind)
        builder.store(rounded, builder.inttoptr(args[0], kind.as_pointer()), align=4)
        # There is an instruction that sums up bytes, unsigned ones.
        unsigned = builder.xor(rounded, ir.Constant(kind, [0x80] * width))
        total = _reduce(builder, "add", builder.zext(unsigned, whole))
        return builder.sub(total, INT32(128 * width))

    return types.int32(types.int64, vector), generate


def _reduce(builder, operation: str, vector):
    """One of LLVM's functions of all numbers of a vector of int32."""
    name = f"llvm.vector.reduce.{operation}.v{vector.type.count}i32"
    kind = ir.FunctionType(INT32, [vector.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector])
