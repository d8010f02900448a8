"""Writers that are killed with SIGKILL at random instants, and what they leave behind.

Run as a program of its own: `killed_writers.py FOLDER KILLS`. It imports once and forks a writer
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

from octavo.paged.tiers import DiskTier

BLOCK_BYTES, BLOCK_SIZE, NUM_BLOCKS = 1 << 18, 8, 64


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def tokens(number: int) -> np.ndarray:
    return np.full(BLOCK_SIZE, number, np.int32)


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def tier(folder: Path) -> DiskTier:
    # Half of the blocks fit, so that files go while others come.
    budget = NUM_BLOCKS // 2 * (BLOCK_BYTES + 4096)
    return DiskTier(folder, budget_bytes=budget, block_bytes=BLOCK_BYTES, block_size=BLOCK_SIZE)


def write_for_ever(folder: Path, seed: int) -> None:
    rng, disk = random.Random(seed), tier(folder)
    blocks = [payload(number) for number in range(NUM_BLOCKS)]
    os.write(1, b"w")
    while True:
        number = rng.randrange(NUM_BLOCKS)
        disk.put(key(number), tokens(number), blocks[number])
        if rng.random() < 0.2:
            disk.flush()


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(0)
    for seed in range(kills):
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(told, 1)
            write_for_ever(folder, seed)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    scraps = len(list(folder.glob("*.tmp")))
    disk, out, right, wrong = tier(folder), np.empty(BLOCK_BYTES, np.uint8), 0, 0
    for number in range(NUM_BLOCKS):
        if disk.read(key(number), tokens(number), out):
            right += np.array_equal(out, payload(number))
            wrong += not np.array_equal(out, payload(number))
    stats = disk.stats()
    print(f"{scraps} {right} {wrong} {stats.errors} {stats.num_bytes <= stats.budget_bytes}")


if __name__ == "__main__":
    main()
