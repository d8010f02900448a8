"""Buffers of loads: aligned, used again, and never while the device still reads them."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from octavo.serve.staging import LoadBuffers


def test_a_buffer_comes_back_only_when_it_has_been_copied() -> None:
    buffers = LoadBuffers((8, 128, 128), np.float32)
    buffer, other = buffers.take(), buffers.take()
    assert buffer is not other
    assert buffer.memory.shape == (8, 128, 128) and buffer.memory.ctypes.data % 64 == 0

    class Result:
        is_there = False

        def block_until_ready(self) -> None:
            self.is_there = True

    copied = Result()
    buffers.give_back(buffer, cast(jax.Array, copied))
    assert not copied.is_there
    assert buffers.take() is buffer and copied.is_there


def test_one_that_is_not_given_back_is_replaced() -> None:
    buffers = LoadBuffers((2, 3), np.float16)
    first = buffers.take()
    second = buffers.take()
    buffers.give_back(second, jnp.int32(0))
    assert buffers.take() is second
    assert buffers.take() not in (first, second)
