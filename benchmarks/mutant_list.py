"""The mutants of `kernel_mutants.py`: what is broken, where, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION, WRITE, SMALL = "test_paged_attention.py", "test_write_kv.py", "test_small_ops.py"
TPU, RACES = "v6 lite-generic", "v6 lite-races"
GPU = "H200-simulate"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """Replace `old`, which occurs once in `pallas_kernels/<file>`, by `new`."""

    what: str
    file: str
    old: str
    new: str
    tests: str
    select: str


GPU_DECODE = "paged_attention/mosaic_gpu/decode_mma.py"


def gpu_decode(what: str, old: str, new: str, case: str, file: str = GPU_DECODE) -> Mutant:
    return Mutant(
        what=f"GPU decode: {what}",
        file=file,
        old=old,
        new=new,
        tests=ATTENTION,
        select=f"matches and {GPU}-{case}",
    )


MUTANTS: tuple[Mutant, ...] = (
    gpu_decode(
        "keys for values",
        "start = geometry.row_words - geometry.value_words",
        "start = 0",
        "decode-one-token",
    ),
    gpu_decode(
        "a key too many",
        "(position < context_len)",
        "(position <= context_len)",
        "decode-boundaries",
    ),
    gpu_decode(
        "a key too few",
        "(position < context_len)",
        "(position < context_len - 1)",
        "decode-boundaries",
    ),
    gpu_decode(
        "the window starts late",
        "jnp.maximum(context_len - options.sliding_window, 0)",
        "jnp.maximum(context_len - options.sliding_window + 1, 0)",
        "window-below",
    ),
    gpu_decode(
        "the window starts early",
        "jnp.maximum(context_len - options.sliding_window, 0)",
        "jnp.maximum(context_len - options.sliding_window - 1, 0)",
        "window-below",
    ),
    gpu_decode(
        "the denominator is not rescaled",
        "total = total * _across(shrink, tile, geometry) + weights",
        "total = total + weights",
        "decode-chunk-edges",
    ),
    gpu_decode(
        "the sum is not rescaled",
        "product(a * shrink, weights, v)",
        "product(a, weights, v)",
        "decode-chunk-edges",
    ),
    gpu_decode(
        "every head reads the first KV head",
        "block * geometry.num_kv_heads + kv_head",
        "block * geometry.num_kv_heads",
        "g4-k5",
    ),
    gpu_decode(
        "the part of a large block is lost",
        "starts.append(start + lax.rem(row, jnp.int32(block_size)))",
        "starts.append(start)",
        "block-256",
    ),
    gpu_decode(
        "the splits overlap",
        "begin = first + split * share",
        "begin = first + split * (share - 1)",
        "decode-chunk-edges",
    ),
    gpu_decode(
        "the scale is dropped",
        "scale = options.scale * 2.0**exponent",
        "scale = 2.0**exponent",
        "scale",
    ),
    gpu_decode("the cap is dropped", "if options.soft_cap is None:", "if True:", "soft-cap"),
    gpu_decode(
        "both numbers of a word are its low byte",
        "(words >> 8).astype(jnp.uint8)",
        "(words & 0xFF).astype(jnp.uint8)",
        "fp8",
        "paged_attention/mosaic_gpu/upcast.py",
    ),
    gpu_decode(
        "the merge forgets a weight",
        "out_a * weight_a",
        "out_a",
        "decode-chunk-edges",
        "paged_attention/mosaic_gpu/decode.py",
    ),
    gpu_decode(
        "sinks count twice",
        "out * jnp.exp(lse - total)[..., None]",
        "out * jnp.exp(lse - total)[..., None] ** 2",
        "sinks",
        "paged_attention/mosaic_gpu/decode.py",
    ),
    Mutant(
        what="GPU decode: a wait for a copy is dropped",
        file=GPU_DECODE,
        old="            plgpu.barrier_wait(landed.at[slot])\n",
        new="            pass\n",
        tests=ATTENTION,
        select="matches and H200-races-decode-boundaries",
    ),
    Mutant(
        what="GPU decode: a slot is refilled while it is read",
        file=GPU_DECODE,
        old="            plgpu.commit_smem()\n",
        new="            pass\n",
        tests=ATTENTION,
        select="matches and H200-races-decode-chunk-edges",
    ),
)
