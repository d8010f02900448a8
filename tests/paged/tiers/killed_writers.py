"""Writers that are killed with SIGKILL at random instants, and what they leave behind.

Run as a program of its own: `killed_writers.py WHERE KILLS`, where that is a folder or the URL of a
server. It imports once and forks a writer
for each kill; then it reads everything.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import redis  # noqa: F401  each child would import it again

from octavo.paged.tiers import DiskTier, RemoteTier, Tier

BLOCK_BYTES, BLOCK_SIZE, NUM_BLOCKS = 1 << 18, 8, 64


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def tokens(number: int) -> np.ndarray:
    return np.full(BLOCK_SIZE, number, np.int32)


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def tier(where: str) -> Tier:
    sizes = {"block_bytes": BLOCK_BYTES, "block_size": BLOCK_SIZE}
    if "://" in where:
        return RemoteTier(where, look_up_seconds=20.0, **sizes)
    # Half of the blocks fit, so that files go while others come.
    budget = NUM_BLOCKS // 2 * (BLOCK_BYTES + 4096)
    return DiskTier(where, budget_bytes=budget, **sizes)


def write_for_ever(where: str, seed: int) -> None:
    rng, store = random.Random(seed), tier(where)
    blocks = [payload(number) for number in range(NUM_BLOCKS)]
    os.write(1, b"w")
    while True:
        number = rng.randrange(NUM_BLOCKS)
        store.put(key(number), tokens(number), blocks[number])
        if rng.random() < 0.2:
            store.flush()


def main() -> None:
    where, kills = sys.argv[1], int(sys.argv[2])
    rng = random.Random(0)
    for seed in range(kills):
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(told, 1)
            write_for_ever(where, seed)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    scraps = len(list(Path(where).glob("*.tmp")))
    store, out, right, wrong = tier(where), np.empty(BLOCK_BYTES, np.uint8), 0, 0
    for number in range(NUM_BLOCKS):
        if store.read([key(number)], tokens(number)[None], out[None]):
            right += np.array_equal(out, payload(number))
            wrong += not np.array_equal(out, payload(number))
    stats = store.stats()
    store.close()
    print(f"{scraps} {right} {wrong} {stats.errors} {stats.num_bytes <= stats.budget_bytes}")


if __name__ == "__main__":
    main()
