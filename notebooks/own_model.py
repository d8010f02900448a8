# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Paged attention in your own Flax model
#
# A plain decoder in Flax NNX, and the same decoder with its keys and values in pages. The paged
# one differs in one call of its attention layer; then prefixes can be shared, prompts computed in
# chunks, and sequences decoded together, by block tables alone.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo.paged import BlockManager, PagedBatch, cached_attention, packed_batch
from octavo.pallas_kernels import cache_shape, copy_blocks, init_kv_cache

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, LAYERS, MAX_LEN = 256, 64, 4, 2, 64, 2, 256


class Attention(nnx.Module):
    """Causal grouped-query attention over one whole sequence, `[T, D] -> [T, D]`."""

    def __init__(self, rngs: nnx.Rngs):
        self.q = nnx.LinearGeneral(WIDTH, (HEADS, HEAD_SIZE), rngs=rngs)
        self.kv = nnx.LinearGeneral(WIDTH, (2, KV_HEADS, HEAD_SIZE), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, HEAD_SIZE), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, kv = self.q(x), self.kv(x)
        k, v = kv[:, 0], kv[:, 1]
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class PagedAttention(Attention):
    """The same layer with its keys and values in a paged cache."""

    def __call__(self, x: jax.Array, kv_cache: jax.Array, batch: PagedBatch):
        q, kv = self.q(x), self.kv(x)
        out, kv_cache = cached_attention(q, kv[:, 0], kv[:, 1], kv_cache, batch)
        return self.out(out), kv_cache


# %% [markdown]
# The rest of the model only hands the cache through, one array per layer. Positions come as an
# argument, because a token's place in a packed batch says nothing about its place in a sequence.


# %%
class Decoder(nnx.Module):
    def __init__(self, attention: type[Attention], rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.place = nnx.Embed(MAX_LEN, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.attention = nnx.List([attention(rngs) for _ in range(LAYERS)])

    def unpaged(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.place(jnp.arange(len(tokens)))
        for norm, attend in zip(self.norms, self.attention, strict=True):
            x = x + attend(norm(x))
        return self.embed.attend(x)

    def paged(self, tokens, positions, kv_caches, batch):
        x = self.embed(tokens) + self.place(positions)
        written = []
        for norm, attend, kv_cache in zip(self.norms, self.attention, kv_caches, strict=True):
            out, kv_cache = attend(norm(x), kv_cache, batch)
            x = x + out
            written.append(kv_cache)
        return self.embed.attend(x[batch.logit_rows]), tuple(written)


plain, twin = Decoder(Attention, nnx.Rngs(0)), Decoder(PagedAttention, nnx.Rngs(0))

# %% [markdown]
# A pool of blocks, and a step that computes the last tokens of any sequences of a batch: a whole
# prompt, what of it is not cached, or one token. The cache is donated, so that it is written in
# place.

# %%
BLOCK, SEATS, STEP = 16, 2, 64
manager = BlockManager(
    num_blocks=40, block_size=BLOCK, num_seqs=SEATS, blocks_per_seq=MAX_LEN // BLOCK
)
shape = cache_shape(40, KV_HEADS, BLOCK, HEAD_SIZE, jax.default_backend())
kv_caches = init_kv_cache(LAYERS, shape, jnp.float32)
graph, weights = nnx.split(twin)


def step(weights, tokens, kv_caches, tables, context_lens, query_lens):
    batch, positions = packed_batch(
        tables, context_lens, query_lens, num_tokens=len(tokens), block_size=BLOCK
    )
    return nnx.merge(graph, weights).paged(tokens, positions, kv_caches, batch)


step = jax.jit(step, donate_argnums=2)


def compute(new: dict[int, np.ndarray], context_lens: dict[int, int]) -> np.ndarray:
    """Compute the new tokens of some seats; returns each seat's logits after its last token."""
    global kv_caches
    tokens = np.concatenate([new.get(seat, np.zeros(0, int)) for seat in range(SEATS)])
    padded = np.zeros(1 if len(tokens) == 1 else STEP, np.int32)
    padded[: len(tokens)] = tokens
    logits, kv_caches = step(
        weights,
        padded,
        kv_caches,
        manager.tables.block_ids,
        np.array([context_lens.get(seat, 0) for seat in range(SEATS)], np.int32),
        np.array([len(new.get(seat, ())) for seat in range(SEATS)], np.int32),
    )
    return np.asarray(logits)


def prefill(seat: int, prompt: np.ndarray) -> tuple[np.ndarray, int]:
    """Logits after a prompt, and how many of its tokens were cached."""
    global kv_caches
    start = manager.admit(seat, prompt)
    for source, target in start.copies:
        ids = jnp.array([source], jnp.int32), jnp.array([target], jnp.int32)
        kv_caches = tuple(copy_blocks(cache, *ids) for cache in kv_caches)
    done, logits = start.num_cached_tokens, np.zeros(0)
    while done < len(prompt):
        part = prompt[done : done + STEP]
        done += len(part)
        logits = compute({seat: part}, {seat: done})[seat]
    manager.publish(seat, prompt)
    return logits, start.num_cached_tokens


# %% [markdown]
# Two prompts with a common beginning: the second one's is found in the cache, to the token. Both
# get the logits of the unpaged twin.

# %%
rng = np.random.default_rng(0)
first = rng.integers(VOCAB, size=150)
second = np.concatenate([first[:120], rng.integers(VOCAB, size=30)])
last = []  # the next token of each sequence
for seat, prompt in enumerate((first, second)):
    logits, cached = prefill(seat, prompt)
    want = np.asarray(plain.unpaged(jnp.asarray(prompt)))[-1]
    print(f"{len(prompt)} tokens, {cached} cached: off by {np.abs(logits - want).max():.1e}")
    last.append(int(logits.argmax()))

# %% [markdown]
# Decoding both together, a token each per step: the greedy continuation is the twin's.

# %%
sequences = [list(first), list(second)]
for _ in range(20):
    for sequence, token in zip(sequences, last, strict=True):
        sequence.append(token)
    lens = {seat: len(sequence) for seat, sequence in enumerate(sequences)}
    manager.append(lens)
    logits = compute({seat: np.array([token]) for seat, token in enumerate(last)}, lens)
    last = [int(row.argmax()) for row in logits]

for start, sequence in zip((first, second), sequences, strict=True):
    # What the twin would say after each token, all at once: it saw the same ones before.
    twins = np.asarray(plain.unpaged(jnp.asarray(sequence)).argmax(axis=-1))[len(start) - 1 : -1]
    print(
        f"20 tokens decoded, equal to the unpaged model's: {list(twins) == sequence[len(start) :]}"
    )

for seat in range(SEATS):
    manager.release(seat)
print(f"active blocks after both are released: {manager.stats().num_active}")
