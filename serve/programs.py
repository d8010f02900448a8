"""The two steps of the engine on device: a packed batch of tokens, and a loop of decode steps.

Both take the weights as a flat list of arrays (fast to dispatch), donate the KV cache and the
history, and read block tables, history and sampling parameters by seat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..models import Llama
from ..models.lora import LoraBatch, LoraStack
from ..paged import PagedBatch, packed_batch, shared_prefixes, token_slots
from .draw import draw
from .logprobs import TokenLogprobs, no_logprobs
from .program import Program
from .prompt_logprobs import score
from .seats import SeatParams
from .speculation import speculate
from .token_masks import TokenMasks

KVCache = tuple[jax.Array, ...]
# A group that saves fewer reads is not worth its second pass.
_MIN_SAVED_BLOCKS = 8
# Rows that draw, up to which a packed step computes the logits of so many and no more.
_FEW_ROWS = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """R sequences of a packed step; `int32[R]` where not said, zeros for padding.

    Attributes:
        seat: row of the block tables.
        context_len: tokens in the cache, the step's own included.
        query_len: the step's own tokens.
        adapter: slot of the sequence's adapter, 0 for none.
        draws: `bool[R]`, whether these are all tokens of the sequence, so that one may follow.
        scored: `bool[R]`, whether it wants to know how likely its own tokens are.
    """

    seat: jax.Array | np.ndarray
    context_len: jax.Array | np.ndarray
    query_len: jax.Array | np.ndarray
    adapter: jax.Array | np.ndarray
    draws: jax.Array | np.ndarray
    scored: jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """R sequences of a decode loop; `int32[R]` each.

    Attributes:
        seat: row of the block tables.
        token: newest token, not yet in the cache.
        context_len: tokens in the cache.
        limit: most tokens to generate, in later loops too; 0 for padding and rows that have ended.
        adapter: slot of the sequence's adapter, 0 for none.
    """

    seat: jax.Array | np.ndarray
    token: jax.Array | np.ndarray
    context_len: jax.Array | np.ndarray
    limit: jax.Array | np.ndarray
    adapter: jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What a dispatch drew, `[steps, R]`.

    Attributes:
        tokens: `int32`, -1 past a row's end.
        logprobs: zeros in steps of which no row wanted them.
    """

    tokens: jax.Array | np.ndarray
    logprobs: TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class StepFns:
    """The functions behind `ModelSteps`, with all that they depend on beside arrays.

    Attributes:
        graphdef, treedef, lora_treedef: structures of model, weights and adapters, as JAX has them.
    """

    graphdef: nnx.GraphDef[Llama]
    treedef: Any
    lora_treedef: Any
    block_size: int
    max_steps: int
    num_drafts: int
    cascade: bool
    deterministic: bool

    def _model(
        self, weights: list[jax.Array], adapter: jax.Array
    ) -> tuple[Llama, LoraBatch | None]:
        """The model, and the adapters in the slots `adapter: int32[T]` for its tokens."""
        own, others = weights[: self.treedef.num_leaves], weights[self.treedef.num_leaves :]
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, own))
        stack = jax.tree.unflatten(self.lora_treedef, others)
        return model, None if stack is None else LoraBatch.of(stack, adapter)

    def _run_fn(
        self, weights: list[jax.Array], adapter: jax.Array
    ) -> Callable[..., tuple[jax.Array, KVCache]]:
        """A call of the model with these adapters."""
        model, lora = self._model(weights, adapter)

        def run(
            tokens: jax.Array, positions: jax.Array, kv_cache: KVCache, batch: PagedBatch
        ) -> tuple[jax.Array, KVCache]:
            batch = replace(batch, batch_invariant=self.deterministic)
            return model(tokens, positions, kv_cache, batch, lora)

        return run

    def packed(
        self,
        weights: list[jax.Array],
        kv_cache: KVCache,
        history: jax.Array,
        block_ids: jax.Array,
        params: SeatParams,
        tokens: jax.Array,
        rows: PackedRows,
        masks: TokenMasks,
    ) -> tuple[Drawn, TokenLogprobs, KVCache, jax.Array]:
        """Compute packed `tokens: int32[T]`; returns each row's next token `[1, R]`.

        And how likely the token was that follows each of `tokens`, `[T]`, if its row is scored.
        """
        batch, position = packed_batch(
            block_ids[rows.seat],
            jnp.asarray(rows.context_len),
            jnp.asarray(rows.query_len),
            num_tokens=tokens.shape[0],
            block_size=self.block_size,
        )

        def of_each_token(x: jax.Array | np.ndarray) -> jax.Array:
            lens, size = jnp.asarray(rows.query_len), tokens.shape[0]
            return jnp.repeat(jnp.asarray(x), lens, total_repeat_length=size)

        model, lora = self._model(weights, of_each_token(rows.adapter))
        batch = replace(batch, batch_invariant=self.deterministic)
        hidden, kv_cache = model.hidden(tokens, position, kv_cache, batch, lora)
        stack = None if lora is None else lora.stack
        logits_fn = partial(model.logits, lora=stack, batch_invariant=self.deterministic)
        following = history.at[of_each_token(rows.seat), position + 1].get(mode="clip")
        scores = score(logits_fn, hidden, following, of_each_token(rows.scored))
        seat, context_len, draws = map(jnp.asarray, (rows.seat, rows.context_len, rows.draws))

        def draw_first(num_rows: int, history: jax.Array) -> tuple[Drawn, jax.Array]:
            own = (seat[:num_rows], context_len[:num_rows], draws[:num_rows])
            logits = logits_fn(hidden[batch.logit_rows[:num_rows]])
            allowed = jax.tree.map(lambda x: x[:num_rows], masks)
            token, logprobs, history = draw(logits, history, params, *own, allowed)
            fill = seat.shape[0] - num_rows
            drawn = Drawn(tokens=token, logprobs=logprobs)
            return jax.tree.map(lambda x: _padded(x, fill)[None], drawn), history

        # A step of few requests spends a fifth of its time on the logits of rows that have none.
        few = min(_FEW_ROWS, seat.shape[0])
        drawn, history = jax.lax.cond(
            jnp.any(draws[few:]),
            partial(draw_first, seat.shape[0]),
            partial(draw_first, few),
            history,
        )
        return drawn, scores, kv_cache, history

    def decode(
        self,
        weights: list[jax.Array],
        kv_cache: KVCache,
        history: jax.Array,
        block_ids: jax.Array,
        params: SeatParams,
        rows: DecodeRows,
        masks: TokenMasks,
        num_steps: jax.Array,
        ready: jax.Array,
    ) -> tuple[Drawn, DecodeRows, KVCache, jax.Array]:
        """Generate up to `num_steps: int32[]` tokens per row; returns them `[steps, R]`.

        And the rows of a loop that goes on from there. A row stops after one of its stop tokens or
        at its limit. Masks are those of one step. Nothing happens unless `ready: bool[]`.
        """
        num_steps = jnp.where(ready, num_steps, 0)
        model = self._run_fn(weights, jnp.asarray(rows.adapter))
        seat, num_rows = jnp.asarray(rows.seat), rows.seat.shape[0]
        row = jnp.arange(num_rows, dtype=jnp.int32)
        tables, stop_ids = block_ids[seat], params.stop_ids[seat]
        # What is shared now stays so while the rows grow.
        prefixes = None
        if self.cascade and num_rows > 1:
            lens = jnp.where(rows.limit > 0, rows.context_len, 0)
            prefixes = shared_prefixes(
                tables, lens, self.block_size, min_saved_blocks=_MIN_SAVED_BLOCKS
            )

        def going(carry: tuple) -> jax.Array:
            step, _, _, active, *_ = carry
            return (step < num_steps) & jnp.any(active)

        def one(carry: tuple) -> tuple:
            step, token, length, active, kv_cache, history, out = carry
            batch = PagedBatch(
                block_tables=tables,
                context_lens=jnp.where(active, length + 1, 0),
                query_start=jnp.arange(num_rows + 1, dtype=jnp.int32),
                slots=token_slots(tables, row, length, active, self.block_size),
                logit_rows=row,
                max_query_len=1,
                prefixes=prefixes,
            )
            logits, kv_cache = model(token, length, kv_cache, batch)
            new, logprobs, history = draw(logits, history, params, seat, length + 1, active, masks)
            drawn = Drawn(tokens=jnp.where(active, new, -1), logprobs=logprobs)
            out = jax.tree.map(lambda steps, x: steps.at[step].set(x), out, drawn)
            stopped = jnp.any(new[:, None] == stop_ids, axis=-1)
            length = length + active.astype(jnp.int32)
            still = active & ~stopped & (step + 1 < rows.limit)
            return step + 1, jnp.where(still, new, token), length, still, kv_cache, history, out

        out = Drawn(
            tokens=jnp.full((self.max_steps, num_rows), -1, jnp.int32),
            logprobs=no_logprobs(self.max_steps, num_rows),
        )
        state = jnp.int32(0), rows.token, rows.context_len, rows.limit > 0
        steps, token, length, still, kv_cache, history, out = jax.lax.while_loop(
            going, one, (*state, kv_cache, history, out)
        )
        limit = jnp.where(still, rows.limit - steps, 0)
        after = replace(rows, token=token, context_len=length, limit=limit)
        return out, after, kv_cache, history

    def speculate(
        self,
        weights: list[jax.Array],
        kv_cache: KVCache,
        history: jax.Array,
        block_ids: jax.Array,
        params: SeatParams,
        rows: DecodeRows,
    ) -> tuple[Drawn, jax.Array, KVCache, jax.Array]:
        """Generate what `decode` would, checking guesses; returns also `int32[2]`, how many.

        The two counts are those of guesses made and of guesses taken.
        """
        seat, context_len, limit = map(jnp.asarray, (rows.seat, rows.context_len, rows.limit))

        def model(tokens: jax.Array, *args: Any, row: jax.Array) -> tuple[jax.Array, KVCache]:
            return self._run_fn(weights, jnp.asarray(rows.adapter)[row])(tokens, *args)

        (tokens, logprobs, checked), kv_cache, history = speculate(
            model,
            kv_cache,
            history,
            block_ids,
            params,
            seat,
            context_len,
            limit,
            num_drafts=self.num_drafts,
            max_tokens=self.max_steps,
            block_size=self.block_size,
        )
        return Drawn(tokens=tokens, logprobs=logprobs), checked, kv_cache, history


class ModelSteps:
    """The steps of one model.

    Attributes:
        weights: the model's arrays; with those of the adapters after them, the first argument of
            both steps.
        packed: see `StepFns.packed`; its size is T.
        decode: see `StepFns.decode`; its size is R.
        speculate: see `StepFns.speculate`; its size is R.
    """

    def __init__(
        self,
        model: Llama,
        lora: LoraStack | None,
        *,
        block_size: int,
        max_decode_steps: int,
        cascade: bool,
        num_drafts: int,
        deterministic: bool,
    ):
        graphdef, state = nnx.split(model)
        self.weights, treedef = jax.tree.flatten(state)
        self._fns = fns = StepFns(
            graphdef=graphdef,
            treedef=treedef,
            lora_treedef=jax.tree.structure(lora),
            block_size=block_size,
            max_steps=max_decode_steps,
            num_drafts=num_drafts,
            cascade=cascade and model.config.sliding_window is None,
            deterministic=deterministic,
        )

        def program(name: str, fn: Callable[..., Any]) -> Program:
            return Program(name, fn, settings=fns, donate=(1, 2))

        self.packed = program("packed step", StepFns.packed)
        self.decode = program("decode loop", StepFns.decode)
        self.speculate = program("speculative decode loop", StepFns.speculate)

    def weights_of(self, model: Llama) -> list[jax.Array]:
        """The weights of a model that differs in nothing else, to be set as `weights`.

        Raises:
            ValueError: it differs.
        """
        graphdef, state = nnx.split(model)
        weights, treedef = jax.tree.flatten(state)
        old, new = ([(w.shape, w.dtype) for w in ws] for ws in (self.weights, weights))
        if (graphdef, treedef, new) != (self._fns.graphdef, self._fns.treedef, old):
            raise ValueError(
                "the weights are of another architecture or data type than those they replace: "
                "make a new engine for them"
            )
        return weights


def buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """Sizes that a dimension is padded to: doubling from `smallest` up to `largest` itself."""
    sizes = []
    size = min(smallest, largest)
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)


def bucket_for(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`."""
    return next(s for s in sizes if s >= size)


def _padded(x: jax.Array, num_rows: int) -> jax.Array:
    return jnp.pad(x, ((0, num_rows), *((0, 0),) * (x.ndim - 1)))
