"""The online softmax of the prefill kernel: keys on the sublanes, queries on the lanes.

It then reduces over sublanes, which the vector unit does without shuffles, and the weights are an
operand of the second product as they are: stationary, all of the matrix unit's array in use,
while the values stream through it. Rows of ones above the values give the sum of the weights.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arguments import AttentionOptions
from .rows import RowParts
from .tiles_plan import Plan

# Rows of ones: the least that keeps 16-bit values below them in whole vectors.
SUM_ROWS = 8
_LOG2_E = math.log2(math.e)
# Finite, so that a row that has seen no key yet has differences that are numbers.
_NO_PEAK = -1e30


def query_factor(options: AttentionOptions) -> float:
    """What queries are multiplied by, so that a product needs no scale."""
    return options.scale * (_LOG2_E if options.soft_cap is None else 1 / options.soft_cap)


class Softmax(NamedTuple):
    """Running state of the R rows of K KV heads, and what a chunk passes through."""

    peak_ref: Any  # float32[K, 1, R], a power of two
    acc_ref: Any  # float32[K, SUM_ROWS + H, R]: the total, in every row of the first
    logits_ref: Any  # float32[2, C, lanes]
    weights_ref: Any  # [2, C, lanes]
    mask_ref: Any  # float32[patterns, C, lanes]: 0 where a key is seen, else -inf
    options: AttentionOptions
    parts: RowParts
    plan: Plan

    def begin(self, k: int, sinks: jax.Array) -> None:
        """A KV head has seen no key, but the sinks `float32[1, R]`, -inf where there is none."""
        _, rows, num_rows = self.acc_ref.shape
        self.peak_ref[k] = jnp.where(sinks == -jnp.inf, _NO_PEAK, sinks * _LOG2_E)
        total = jnp.where(sinks == -jnp.inf, 0.0, 1.0)
        self.acc_ref[k, :-SUM_ROWS] = jnp.zeros((rows - SUM_ROWS, num_rows), jnp.float32)
        self.acc_ref[k, -SUM_ROWS:] = jnp.broadcast_to(total, (SUM_ROWS, num_rows))

    def finish(self, k: int) -> tuple[jax.Array, jax.Array]:
        """Output `float32[H, R]` of a KV head, and the natural logarithm of its denominator."""
        total = self.acc_ref[k, -1:]
        out = self.acc_ref[k, :-SUM_ROWS] / jnp.where(total == 0, 1.0, total)
        return out, (self.peak_ref[k] + jnp.log2(total)) / _LOG2_E

    def unmask(self) -> None:
        """Every query sees every key."""
        self.mask_ref[...] = jnp.zeros(self.mask_ref.shape, jnp.float32)

    def mask(self, position: Any, seen: Any) -> None:
        """For a chunk whose first key is at `position`; query 0 sees the keys up to `seen`."""
        _, chunk, lanes = self.mask_ref.shape
        word_rows = self.plan.tile * self.plan.pack
        key = position + jax.lax.broadcasted_iota(jnp.int32, (chunk, 1), 0)
        for pattern in range(self.plan.patterns):
            row = pattern * lanes + jax.lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
            limit = seen + (row % word_rows // self.plan.pack if self.plan.causal else 0 * row)
            visible = self.options.visible(key, limit)
            self.mask_ref[pattern] = jnp.where(visible, 0.0, -jnp.inf)

    def attend(self, rows_ref: Any, kv_ref: Any, zero: Any) -> None:
        """Fold in a chunk `kv_ref [K, C, ROW]`, for queries `rows_ref [K, R, W]`.

        In units of `lanes` rows, and in three stages, each a unit behind the one before, so that
        the matrix unit always has something to do.

        Args:
            zero: is 0, but must not be known at compile time. With a place known then,
                the compiler keeps logits in registers, and spills most of them, several times.
        """
        lanes, num_rows = self.plan.lanes, rows_ref.shape[1]
        units = [
            _Unit(number, k, slice(lane, lane + lanes))
            for number, (k, lane) in enumerate(
                (k, lane) for k in range(rows_ref.shape[0]) for lane in range(0, num_rows, lanes)
            )
        ]
        values: dict[int, jax.Array] = {}
        peaks: list[jax.Array] = []
        shrinks: list[jax.Array] = []
        for stage in range(len(units) + 2):
            if stage < len(units):
                unit = units[stage]
                logits = self._logits(unit, rows_ref, kv_ref)
                logits += self.mask_ref[unit.number % self.plan.patterns]
                self.logits_ref[zero + unit.parity] = logits
                peaks.append(jnp.max(logits, axis=0, keepdims=True))
            if 1 <= stage <= len(units):
                unit = units[stage - 1]
                shrinks.append(self._weigh(unit, peaks[unit.number], zero))
            if stage >= 2:
                unit = units[stage - 2]
                if unit.kv_head not in values:
                    values = {unit.kv_head: self._values(unit, kv_ref)}
                self._add(unit, values[unit.kv_head], shrinks[unit.number])

    def _logits(self, unit: _Unit, rows_ref: Any, kv_ref: Any) -> jax.Array:
        """In powers of two `float32[C, lanes]`."""
        logits = jax.lax.dot_general(
            self.parts.key(kv_ref[unit.kv_head, :, : self.parts.key_width]),
            rows_ref[unit.kv_head, unit.lanes, :],
            (((1,), (1,)), ((), ())),
            precision=self.parts.precision,
            preferred_element_type=jnp.float32,
        )
        if self.options.soft_cap is not None:
            logits = jnp.tanh(logits) * (self.options.soft_cap * _LOG2_E)
        return logits

    def _weigh(self, unit: _Unit, new_peak: jax.Array, zero: Any) -> jax.Array:
        """Store the weights of a unit; return by what its sums so far shrink."""
        old = self.peak_ref[unit.kv_head, :, unit.lanes]
        peak = jnp.maximum(old, new_peak)
        self.peak_ref[unit.kv_head, :, unit.lanes] = peak
        weights = jnp.exp2(self.logits_ref[zero + unit.parity] - peak)
        self.weights_ref[unit.parity] = weights.astype(self.parts.product_dtype)
        return jnp.exp2(old - peak)

    def _values(self, unit: _Unit, kv_ref: Any) -> jax.Array:
        """Ones above the values `[SUM_ROWS + H, C]`."""
        head_size = self.acc_ref.shape[1] - SUM_ROWS
        value = self.parts.value(kv_ref[unit.kv_head]).T
        begin = head_size - self.parts.value_begin
        ones = jnp.ones((SUM_ROWS, value.shape[1]), value.dtype)
        return jnp.concatenate([value[begin : begin + head_size], ones])

    def _add(self, unit: _Unit, values: jax.Array, shrink: jax.Array) -> None:
        added = jax.lax.dot_general(
            values,
            self.weights_ref[unit.parity],
            (((1,), (0,)), ((), ())),
            precision=self.parts.precision,
            preferred_element_type=jnp.float32,
        )
        acc = self.acc_ref[unit.kv_head, :, unit.lanes] * shrink + added
        self.acc_ref[unit.kv_head, :, unit.lanes] = acc


class _Unit(NamedTuple):
    """Rows of a KV head that go through the stages together."""

    number: int
    kv_head: int
    lanes: slice

    @property
    def parity(self) -> int:
        return self.number % 2
