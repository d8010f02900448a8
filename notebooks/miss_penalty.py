# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What a miss costs
#
# A prefix of 128K tokens that is in the cache answers in a moment; one that is not takes minutes.
# Why, by arithmetic first; then measured on this machine with a small model; then what it says
# about what to pin, what to keep in host memory and what to put first in a prompt.

# %%
import os
from dataclasses import replace
from time import perf_counter

import numpy as np
from flax import nnx
from matplotlib import pyplot as plt

from octavo.models import Llama, LlamaConfig, load_model
from octavo.paged.cost_model import (
    HARDWARE,
    CostModel,
    attention_flops,
    calibrate,
    fit_prefill,
    kv_bytes,
    miss_penalty,
    model_shape,
    prefill_flops,
)
from octavo.serve import Engine, EngineConfig, SamplingParams
from octavo.serve.model_shape import shape_of

# Tokens of the longest prefix that is measured below; 131072 takes some minutes.
LONGEST = int(os.environ.get("OCTAVO_LONGEST", "1024"))

# %% [markdown]
# ## The quadratic cliff
#
# Every query head multiplies each of its queries with all keys before it, and the weights with all
# values: `4 H` FLOPs per pair, half of `n * n` pairs, so `2 N H n^2` a layer. Query heads do the
# work, not KV heads: who counts those is off by their ratio, 8 for this model. And every layer
# does: who counts one is off by 80.

# %%
shape = model_shape("llama-3.1-70b")
n = 131_072
layers = attention_flops(shape, 0, n)
print(
    f"attention of {n:,} tokens: {layers / 1e15:.1f} PFLOP, a layer {layers / 80 / 1e12:.1f} TFLOP"
)
print(f"with the matrices {prefill_flops(shape, 0, n) / 1e15:.1f} PFLOP")
print(f"the last 32 of them alone {prefill_flops(shape, n - 32, n) / 1e12:.1f} TFLOP")
print(f"keys and values {kv_bytes(shape, n) / 1e9:.1f} GB")

# %% [markdown]
# ## Miss, restore, hit
#
# On eight H200: a miss computes all of it, a restore moves the keys and values over a link, a hit
# reads them from the device's own memory. Below the ridge of the roofline a step waits for memory,
# above it for arithmetic: a miss is far above, a hit of few tokens and a decode step are below, and
# so they differ not only in work but in what they wait for.

# %%
costs = CostModel(shape, HARDWARE["h200"], num_devices=8)
told = miss_penalty(costs, n, 32)
print(f"ridge at {costs.machine.ridge:.0f} FLOP per byte")
for outcome in told.outcomes:
    print(f"{outcome.name:7} {outcome.seconds:9.4f} s {outcome.intensity:9.1f} FLOP/byte")
for tier in told.break_even:
    print(f"from {tier.tier}: sooner than computing from {tier.length} tokens on")

# %%
lengths = [1 << i for i in range(10, 18)]
rows = [miss_penalty(costs, length, 32).by_name for length in lengths]
figure, axes = plt.subplots(figsize=(6, 4))
for name in ("miss", "disk", "host", "hit"):
    axes.loglog(lengths, [row[name].seconds for row in rows], "o-", label=name)
axes.set(xlabel="prefix, tokens", ylabel="seconds to first token", title="70B on eight H200")
axes.legend()
plt.show()

# %% [markdown]
# ## Measured here
#
# A Llama of two layers with random weights, in the engine as it is. Each length is asked for three
# times: with nothing cached, with the prefix on the device, and with the prefix in host memory
# alone. The first lengths teach the cost model how fast this machine is; the last one is predicted
# before it is measured.

# %%
config = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=128,
    max_context_len=LONGEST + 256,
    tie_embeddings=True,
)
small = replace(
    load_model("smollm2"),  # for its tokenizer
    name="small",
    model=Llama(config, rngs=nnx.Rngs(0)),
    config=config,
    fingerprint="small",
)
engine = Engine(
    small,
    EngineConfig(
        num_blocks=LONGEST // 16 + 64,
        max_num_seqs=2,
        max_num_batched_tokens=128,
        host_cache_gib=0.1 + LONGEST / 2**19,
        restore_policy="always",  # to see what it takes, also where computing is sooner
    ),
)
engine.warmup()
empty = engine.cache_snapshot()
once = SamplingParams(temperature=0, max_tokens=1)
rng = np.random.default_rng(0)


def tokens(count: int) -> list[int]:
    return rng.integers(0, config.vocab_size, count).tolist()


def first_token(prompt: list[int]) -> tuple[float, int]:
    """Seconds, and tokens that were not computed."""
    start = perf_counter()
    (answer,) = engine.generate([prompt], once)
    return perf_counter() - start, answer.num_cached_tokens


def measure(length: int) -> dict[str, float]:
    prefix = tokens(length)
    engine.reset_cache()
    miss, cached = first_token(prefix + tokens(32))
    assert cached == 0
    hit, cached = first_token(prefix + tokens(32))
    assert cached == length
    engine.restore_cache(empty)  # the device's alone; host memory keeps what it has
    host, cached = first_token(prefix + tokens(32))
    assert cached == length
    return {"miss": miss, "host": host, "hit": hit}


# %%
own = shape_of(config, param_dtype_bytes=4, kv_dtype_bytes=4)
here = CostModel(own, calibrate(own, chunk_size=128), chunk_size=128)
measure(64)
measured: dict[int, dict[str, float]] = {}
length = LONGEST // 8
while length < LONGEST:
    measured[length] = measure(length)
    length *= 2
here = fit_prefill(here, [(0, k + 32, row["miss"]) for k, row in measured.items()])
predicted = here.seconds_to_first_token(0, LONGEST + 32)
measured[LONGEST] = measure(LONGEST)
print(f"{here.hardware.matmul_flops_per_second / 1e9:.0f} GFLOP/s in products with parameters")
for length, row in measured.items():
    print(f"{length:7}" + "".join(f" {name} {1e3 * s:9.1f} ms" for name, s in row.items()))
print(f"predicted miss at {LONGEST}: {1e3 * predicted:.1f} ms")

# %% [markdown]
# ## What pinning, offloading and aligning buy
#
# A pin saves a hit's advantage over wherever the prefix would lie otherwise: over nothing it is the
# whole miss, over host memory only the link. So host memory takes most of the risk out of eviction,
# and pins are for prefixes so hot that the link is too much.
#
# And one token that varies at the start of a prompt makes all of it a miss. The same request with
# what varies at the end costs as much as its own few tokens.

# %%
for where, seconds in told.saved_by_pin.items():
    print(f"a pin of {n:,} tokens saves {seconds:8.3f} s against {where}")
prefix, name = tokens(LONGEST // 2), tokens(16)
engine.reset_cache()
first_token(prefix + name)
last, cached_last = first_token(prefix + tokens(16))
first, cached_first = first_token(tokens(16) + prefix)
print(f"varying tokens last:  {cached_last} of {LONGEST // 2 + 16} cached, {1e3 * last:.1f} ms")
print(f"varying tokens first: {cached_first} of {LONGEST // 2 + 16} cached, {1e3 * first:.1f} ms")
