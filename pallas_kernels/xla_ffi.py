"""Writing XLA's custom calls in Numba: its C structs by word, and the few instructions it lacks.

XLA hands a custom call a frame of C structs (`xla/ffi/api/c_api.h`, in `jax.ffi.include_dir()`).
They consist of 8-byte words, so that arrays of int64 can read and write them. What a handler does
not fill at once it may go on with in XLA's own threads, and tell XLA when it is done. Two things
are not so, and were tried: a thread that waits for others may wait for ever, as all of them may be
waiting; and the frame does not last until the call is over, it is used again for the next one.

Import this module only where Numba is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import extending, types

# What it decorates is called without the first parameter, which type checkers cannot know.
intrinsic = cast(Callable[[Callable[..., Any]], Callable[..., Any]], extending.intrinsic)

# Words of XLA_FFI_CallFrame.
EXTENSION, API, CONTEXT, ARGS, RETS, FUTURE = 1, 2, 3, 9, 14, 21
FRAME_WORDS = 22
# Words of XLA_FFI_Buffer.
DATA, DIMS = 3, 5
# Words of XLA_FFI_Api: its version, and functions that have not moved in the minor versions of
# JAX 0.10 (3) to 0.12 (5).
VERSION, SCHEDULE, FUTURE_CREATE, FUTURE_SET_AVAILABLE = 4, 17, 19, 20
OLDEST_MINOR, NEWEST_MINOR = 3, 5
# Words of XLA_FFI_Metadata_Extension and XLA_FFI_Metadata, and the extension's type.
METADATA, METADATA_VERSION, METADATA_TYPE = 3, 3, 1

_INT64 = ir.IntType(64)


@intrinsic
def pointer_to(typing_context, address, dtype):
    signature = types.CPointer(dtype.dtype)(types.int64, dtype)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, generate


@intrinsic
def call_address(typing_context, address, argument):
    """Call the C function `int64(int64)` at an address."""
    signature = types.int64(types.int64, types.int64)

    def generate(context, builder, signature, args):
        function = ir.FunctionType(_INT64, [_INT64]).as_pointer()
        return builder.call(builder.inttoptr(args[0], function), [args[1]])

    return signature, generate


@intrinsic
def callback_of(typing_context, function):
    """The address of a C function `void(int64)` that runs a compiled function of an int64.

    Not that of a `cfunc`, which would be another one when cached code is used again.
    """
    inner = types.void(types.int64)

    def generate(context, builder, signature, args):
        python_function = signature.args[0].dispatcher.py_func
        compiled = context.compile_subroutine(builder, python_function, inner)
        kind = ir.FunctionType(ir.VoidType(), [_INT64])
        name = builder.module.get_unique_name("octavo_callback")
        wrapper = ir.Function(builder.module, kind, name)
        wrapper.linkage = "internal"
        body = ir.IRBuilder(wrapper.append_basic_block())
        context.call_internal_no_propagate(body, compiled.fndesc, inner, wrapper.args)
        body.ret_void()
        return builder.ptrtoint(wrapper, _INT64)

    return types.int64(function), generate


@intrinsic
def atomic_add(typing_context, address, value):
    """Add to the int64 at an address; returns what was there before."""
    signature = types.int64(types.int64, types.int64)

    def generate(context, builder, signature, args):
        place = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return signature, generate


@intrinsic
def allocate(typing_context, num_bytes):
    """The address of memory of its own, for `free`; 0 if there is none."""
    signature = types.int64(types.int64)

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(_INT64, [_INT64])
        return builder.call(_of_libc(builder.module, kind, "malloc"), args)

    return signature, generate


@intrinsic
def free(typing_context, address):
    """Give memory of `allocate` back."""
    signature = types.void(types.int64)

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_INT64])
        builder.call(_of_libc(builder.module, kind, "free"), args)
        return context.get_dummy_value()

    return signature, generate


def _of_libc(module, kind, name):
    return module.globals.get(name) or ir.Function(module, kind, name)


def _prefetch(locality: int):
    @intrinsic
    def prefetch(typing_context, address):
        signature = types.void(types.int64)

        def generate(context, builder, signature, args):
            place = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
            function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
            builder.call(function, [place, word(0), word(locality), word(1)])
            return context.get_dummy_value()

        return signature, generate

    return prefetch


# Fetch the cache line at an address, which need not be mapped, into the innermost cache; or into
# the next one, for what is used later: many fetches into the innermost make its reads wait.
prefetch, prefetch_for_later = _prefetch(3), _prefetch(2)


@intrinsic
def copy_line(typing_context, target, source):
    """Copy a cache line, both at multiples of 64, and do not keep the target's in the cache."""
    signature = types.void(types.int64, types.int64)

    def generate(context, builder, signature, args):
        line = ir.VectorType(_INT64, 8).as_pointer()
        new, old = (builder.inttoptr(address, line) for address in args)
        copied = builder.store(builder.load(old, align=64), new, align=64)
        copied.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return signature, generate
