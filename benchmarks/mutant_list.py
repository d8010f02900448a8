"""The mutants of `kernel_mutants.py`: what is broken, where, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION, WRITE, SMALL = "test_paged_attention.py", "test_write_kv.py", "test_small_ops.py"
TPU, RACES = "lite-generic", "lite-races"
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


WRITE_TPU, WRITE_GPU = "write_kv/mosaic_tpu.py", "write_kv/mosaic_gpu.py"
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


def gpu_prefill(what: str, file: str, old: str, new: str, select: str) -> Mutant:
    return Mutant(
        what=f"GPU prefill: {what}",
        file=f"paged_attention/mosaic_gpu/{file}",
        old=old,
        new=new,
        tests=ATTENTION,
        select=f"matches and {select}",
    )


def tpu(kernel: str, what: str, old: str, new: str, case: str) -> Mutant:
    return Mutant(
        what=f"TPU {kernel}: {what}",
        file=f"paged_attention/mosaic_tpu/{kernel}.py",
        old=old,
        new=new,
        tests=ATTENTION,
        select=f"matches and {case}",
    )


def write(what: str, file: str, old: str, new: str, select: str) -> Mutant:
    return Mutant(what=f"write_kv: {what}", file=file, old=old, new=new, tests=WRITE, select=select)


def move(what: str, file: str, old: str, new: str, select: str) -> Mutant:
    return Mutant(
        what=f"moving blocks: {what}", file=file, old=old, new=new, tests=SMALL, select=select
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
    Mutant(
        what="GPU decode: the denominator is not rescaled",
        file=GPU_DECODE,
        old="total = total * _across(shrink, tile, geometry) + weights",
        new="total = total + weights",
        tests=ATTENTION,
        select="splits and decode-chunk-edges",
    ),
    Mutant(
        what="GPU decode: the sum is not rescaled",
        file=GPU_DECODE,
        old="product(a * shrink, weights, v)",
        new="product(a, weights, v)",
        tests=ATTENTION,
        select="splits and decode-chunk-edges",
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
        "paged_attention/mosaic_gpu/merge.py",
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
        select="splits and H200-races",
    ),
    write(
        "keys and values change places",
        WRITE_TPU,
        "jnp.concatenate([k, v], axis=-1)",
        "jnp.concatenate([v, k], axis=-1)",
        f"to_the_bit and {TPU}-mixed",
    ),
    write(
        "stale bits beside a row",
        WRITE_TPU,
        "                word &= jnp.uint32((1 << bits) - 1)\n",
        "",
        f"to_the_bit and {RACES}-mixed",
    ),
    write(
        "the wait for a window is dropped",
        WRITE_TPU,
        "            read(ring[_WINDOW, slot], slot).wait()",
        "            pass",
        f"to_the_bit and {RACES}-mixed",
    ),
    write(
        "the wait for new rows is dropped",
        WRITE_TPU,
        "            read_new(0, 0, 1, slot).wait()",
        "            pass",
        f"to_the_bit and {RACES}-mixed",
    ),
    write(
        "the wait for a write is dropped",
        WRITE_TPU,
        "            write(ring[_WINDOW, before], before).wait()",
        "            pass",
        f"to_the_bit and {RACES}-large",
    ),
    write(
        "an opened block keeps what was in it",
        WRITE_TPU,
        "keeps = ~is_run & (block != opened)",
        "keeps = ~is_run",
        f"to_the_bit and {TPU}-mixed",
    ),
    write(
        "the null block is written",
        WRITE_TPU,
        "is_live = (slots >= block_size) & (slots < past)",
        "is_live = (slots >= 0) & (slots < past)",
        f"to_the_bit and {TPU}-mixed",
    ),
    write(
        "shuffled tokens count as a run",
        WRITE_TPU,
        "& (jnp.roll(order, -i) - order == i)",
        "",
        f"to_the_bit and {TPU}-shuffled",
    ),
    write(
        "a row is zeroed after it was written",
        WRITE_GPU,
        "jnp.where(opened, end, 0)",
        "jnp.where(opened, block_size, 0)",
        f"to_the_bit and {GPU}",
    ),
    write(
        "a block that nobody opened is zeroed",
        WRITE_GPU,
        "jnp.where(opened, end, 0)",
        "end",
        f"to_the_bit and {GPU}-mixed",
    ),
    write(
        "slots outside the pool are followed",
        WRITE_GPU,
        "live = (block > 0) & (block < num_blocks)",
        "live = block > 0",
        f"to_the_bit and {GPU}-mixed",
    ),
    write(
        "large numbers do not saturate",
        "quantise.py",
        "jnp.clip(scaled, -largest, largest)",
        "scaled",
        "to_the_bit and xla-mixed-fp8",
    ),
    write(
        "values take the scale of keys",
        "write_kv/__init__.py",
        "quantise(v, v_scale,",
        "quantise(v, k_scale,",
        "to_the_bit and xla-mixed-int8",
    ),
    move(
        "a block that is read too is overwritten first",
        "copy_blocks/overlap.py",
        "jnp.any(writes & jnp.isin(dst, read))",
        "jnp.any(writes & False)",
        f"copies_those and ({RACES} or H200)",
    ),
    move(
        "of two with one target the first counts",
        "gather_blocks/targets.py",
        "jnp.where(is_last, ordered, NULL_BLOCK)",
        "ordered",
        "copies_those and twice",
    ),
    move(
        "the last copy is not waited for",
        "tpu_memory.py",
        "    @pl.loop(max(0, count - _IN_FLIGHT), count)",
        "    @pl.loop(max(0, count - _IN_FLIGHT) + 1, count)",
        f"{RACES} and (copies or gathered)",
    ),
    move(
        "a copy in flight is not waited for",
        "tpu_memory.py",
        "when(i - _IN_FLIGHT, lambda: copy(i - _IN_FLIGHT).wait())",
        "pass",
        f"{RACES} and many",
    ),
    move(
        "an id outside the pool is followed",
        "layout.py",
        "return jnp.where(inside, block_ids, NULL_BLOCK)",
        "return block_ids",
        "copies_those or gathered",
    ),
    gpu_prefill(
        "keys for values",
        "tiles_wgmma.py",
        "values = Stream(v_ring, v_landed, v_freed, pl.ds(end - columns.box, columns.box))",
        "values = Stream(v_ring, v_landed, v_freed, pl.ds(0, columns.box))",
        f"{GPU}-prefill-whole",
    ),
    gpu_prefill(
        "the wait for values is dropped",
        "tiles_wgmma.py",
        "plgpu.barrier_wait(values.landed.at[slot])\n",
        "pass\n",
        "H200-races-prefill-many-chunks",
    ),
    gpu_prefill(
        "the wait for keys is dropped",
        "tiles_wgmma.py",
        "plgpu.barrier_wait(keys.landed.at[slot])\n",
        "pass\n",
        "H200-races-prefill-many-chunks",
    ),
    gpu_prefill(
        "the second warpgroup masks the first one's rows",
        "tiles_wgmma.py",
        "wg * _WG_ROWS, position, context",
        "0, position, context",
        f"{GPU}-prefill-over-tiles",
    ),
    gpu_prefill(
        "a slot is refilled while it is read",
        "tiles_load.py",
        "            _wait_if(step >= stages, stream.freed.at[slot])\n            _copy",
        "            _copy",
        "H200-races-prefill-many-chunks",
    ),
    gpu_prefill(
        "a key too few",
        "tiles_plan.py",
        "position = context - (query_start[seq + 1] - start)",
        "position = context - (query_start[seq + 1] - start) - 1",
        f"{GPU}-prefill-whole",
    ),
    gpu_prefill(
        "a key too many",
        "tiles_plan.py",
        "position = context - (query_start[seq + 1] - start)",
        "position = context - (query_start[seq + 1] - start) + 1",
        f"{GPU}-prefill-whole",
    ),
    gpu_prefill(
        "the diagonal counts as full",
        "tiles_plan.py",
        "(position + 1 if options.causal",
        "(position + block_kv if options.causal",
        f"{GPU}-prefill-over-tiles",
    ),
    gpu_prefill(
        "the window starts a chunk late",
        "tiles_plan.py",
        "first = jnp.maximum(position - options.sliding_window + 1, 0) // block_kv",
        "first = jnp.maximum(position - options.sliding_window + 1, 0) // block_kv + 1",
        f"{GPU}-window-wide",
    ),
    gpu_prefill(
        "the window's edge counts as full",
        "tiles_plan.py",
        "full_begin = -(-jnp.maximum(after - options.sliding_window, 0) // block_kv)",
        "full_begin = jnp.maximum(after - options.sliding_window, 0) // block_kv",
        f"{GPU}-window-wide",
    ),
    gpu_prefill(
        "rows are packed wrongly",
        "tiles_plan.py",
        "row // groups]",
        "row % groups]",
        f"{GPU}-prefill-whole",
    ),
    Mutant(
        what="GPU prefill: the splits overlap",
        file="paged_attention/mosaic_gpu/tiles_plan.py",
        old="split_last = jnp.minimum(split_first + share, last[:, None])",
        new="split_last = jnp.minimum(split_first + share + 1, last[:, None])",
        tests=ATTENTION,
        select="splits and prefill-chunk",
    ),
    gpu_prefill(
        "the denominator is not rescaled",
        "tiles_softmax.py",
        "total = state.total * shrink + ",
        "total = state.total + ",
        f"{GPU}-prefill-many-chunks",
    ),
    gpu_prefill(
        "the context's end is not masked",
        "tiles_softmax.py",
        "return key < context",
        "return key <= context",
        f"{GPU}-not-causal",
    ),
    gpu_prefill(
        "the halves of a head change places",
        "tiles_load.py",
        "columns = pl.ds(part * box + column, piece)",
        "columns = pl.ds((1 - part) * box + column, piece)",
        f"{GPU}-int8",
    ),
    gpu_prefill(
        "keys for values (mma)",
        "tiles_mma.py",
        "pl.ds(row_words - columns.box, columns.box)",
        "pl.ds(0, columns.box)",
        "A100-simulate-prefill-whole",
    ),
    gpu_prefill(
        "the wait for a copy is dropped (mma)",
        "tiles_mma.py",
        "            plgpu.barrier_wait(kv_landed.at[slot])\n",
        "",
        "A100-races-prefill-many-chunks",
    ),
    gpu_prefill(
        "the output is not rescaled (mma)",
        "tiles_mma.py",
        "acc = tuple(a * over_rows(shrink, a.shape, acc_layout) for a in acc)",
        "pass",
        "A100-simulate-prefill-many-chunks",
    ),
    tpu("decode", "keys for values", "parts.value(kv)", "parts.key(kv)", f"{TPU}-g8-h128"),
    tpu(
        "decode",
        "a key too many",
        "options.visible(key_position, context_len - 1)",
        "options.visible(key_position, context_len)",
        f"{TPU}-decode-boundaries",
    ),
    tpu(
        "decode",
        "the window starts late",
        "context_lens - options.sliding_window, 0",
        "context_lens - options.sliding_window + 16, 0",
        f"{TPU}-window-below",
    ),
    tpu(
        "decode",
        "sinks are dropped",
        "jnp.where(peak == -jnp.inf, 0.0, 1.0)",
        "jnp.zeros(peak.shape)",
        f"{TPU}-sinks",
    ),
    tpu(
        "decode",
        "what is behind the tail stays",
        "buffer_ref[half, :, rows] = jnp.zeros(shape, buffer_ref.dtype)",
        "pass",
        f"{RACES}-decode-boundaries",
    ),
    tpu(
        "decode",
        "the wait for a whole chunk is dropped",
        "for page in range(pages):\n            copy(table_ref, 0, half, page).wait()",
        "pass",
        f"{RACES}-decode-chunk-edges",
    ),
    tpu(
        "decode",
        "the wait for a tail is dropped",
        "            copy(table_ref, 0, half, page).wait()\n\n        jax",
        "            pass\n\n        jax",
        f"{RACES}-decode-chunk-edges",
    ),
    tpu(
        "tiles_softmax",
        "keys for values",
        "parts.value(kv_ref",
        "parts.key(kv_ref",
        f"{TPU}-g8-h128",
    ),
    tpu(
        "tiles_softmax",
        "a key too many",
        "self.options.visible(key, limit)",
        "self.options.visible(key, limit + 1)",
        f"{TPU}-prefill-whole",
    ),
    tpu(
        "tiles",
        "the diagonal counts as full",
        "position + chunk - 1 <= seen",
        "position + chunk - 8 <= seen",
        f"{TPU}-prefill-over-tiles",
    ),
    tpu(
        "tiles_plan",
        "the window starts late",
        "seen - options.sliding_window + 1, 0",
        "seen - options.sliding_window + 17, 0",
        f"{TPU}-window-below",
    ),
    tpu(
        "tiles",
        "a neighbour's rows are overwritten",
        "outputs.start(*tokens_of(i))",
        "outputs.start(scalars_ref[1, i], plan.tile)",
        f"{TPU}-prefill-chunk",
    ),
    tpu(
        "tiles_load",
        "what is behind the tail stays",
        "self.buffer_ref[half] = zeros",
        "pass",
        f"{RACES}-prefill-whole",
    ),
    tpu(
        "tiles_load",
        "the wait for keys and values is dropped",
        "self._copy(ids_ref, 0, half, page).wait()",
        "None",
        f"{RACES}-prefill-whole",
    ),
    tpu(
        "tiles",
        "the wait for queries is dropped",
        "queries(half).wait(*tokens_of(i))",
        "pass",
        f"{RACES}-prefill-whole",
    ),
    tpu(
        "tiles",
        "the wait for a result is dropped",
        "outputs.wait(*tokens_of(i - 1))",
        "pass",
        f"{RACES}-prefill-chunk",
    ),
    Mutant(
        what="attention: the scales of keys are dropped",
        file="paged_attention/__init__.py",
        old="(q.astype(jnp.float32) * k_scale)",
        new="q.astype(jnp.float32)",
        tests=ATTENTION,
        select="matches and xla-int8",
    ),
    Mutant(
        what="attention: the scales of values are dropped",
        file="paged_attention/__init__.py",
        old="(out.astype(jnp.float32) * v_scale)",
        new="out.astype(jnp.float32)",
        tests=ATTENTION,
        select="matches and xla-int8",
    ),
    Mutant(
        what="XLA prefill: chunks that only the last query of a tile sees whole are not masked",
        file="paged_attention/xla.py",
        old="first = (position[0] + 1) // chunk_tokens",
        new="first = (position[count - 1] + 1) // chunk_tokens",
        tests=ATTENTION,
        select="matches and xla-prefill-over-tiles",
    ),
    Mutant(
        what="XLA prefill: small tiles begin where the large ones did",
        file="paged_attention/xla.py",
        old="first_index = first_query[seq] + (i - before) * tile",
        new="first_index = (i - before) * tile",
        tests=ATTENTION,
        select="matches and xla-prefill-over-tiles",
    ),
)
