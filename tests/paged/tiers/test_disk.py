"""The disk tier: what it returns is right, whatever has become of the files and the disk."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from octavo.paged.tiers import DiskTier, block_file, block_format, disk

from .blocks import BLOCK_BYTES, DAMAGES, SIZES, has, held, key, payload, put, tokens

FILE_BYTES = block_format.num_bytes(SIZES["block_size"], BLOCK_BYTES)


@pytest.fixture
def new_tier(tmp_path: Path):
    """Makes tiers of one folder, and closes them in the end."""
    tiers = []

    def make(num_blocks: int = 100, **options) -> DiskTier:
        sizes = SIZES | {"budget_bytes": num_blocks * FILE_BYTES} | options
        tiers.append(DiskTier(tmp_path / "blocks", **sizes))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()
    assert not any(thread.name == "octavo-tier-writer" for thread in threading.enumerate())


def path_of(tmp_path: Path, number: int) -> Path:
    return tmp_path / "blocks" / f"{key(number).hex()}.kv"


def test_blocks_are_there_after_a_restart(new_tier, tmp_path):
    first = new_tier()
    put(first, 1, 2)
    assert held(first, 1, 2, 3) == [1, 2]
    first.close()
    again = new_tier()
    assert key(1) in again and key(3) not in again
    assert held(again, 1, 2, 3) == [1, 2]
    stats = again.stats()
    assert (stats.hits, stats.misses, stats.errors, stats.num_blocks) == (2, 1, 0, 2)
    assert stats.num_bytes == 2 * FILE_BYTES
    assert (tmp_path / "blocks").stat().st_mode & 0o077 == 0


def test_close_writes_what_waits(new_tier):
    first = new_tier()
    for number in range(50):
        first.put(key(number), tokens(number), payload(number))
    first.close()
    first.put(key(50), tokens(50), payload(50))  # too late, and no harm
    assert first.stats().drops == 1
    assert held(new_tier(), *range(51)) == list(range(50))


def test_a_block_is_found_before_it_is_written(new_tier, monkeypatch):
    go_on = threading.Event()
    write = disk.write_block

    def slowly(*args) -> None:
        go_on.wait()
        write(*args)

    monkeypatch.setattr(disk, "write_block", slowly)
    tier = new_tier()
    tier.put(key(1), tokens(1), payload(1))
    assert key(1) in tier and has(tier, 1)
    assert not tier.read([key(1)], tokens(2)[None], np.zeros((1, BLOCK_BYTES), np.uint8))
    go_on.set()
    tier.flush()
    assert has(tier, 1)


def test_what_comes_faster_than_the_disk_is_dropped_and_counted(new_tier, monkeypatch):
    go_on = threading.Event()
    write = disk.write_block
    monkeypatch.setattr(disk, "write_block", lambda *args: (go_on.wait(), write(*args)))
    tier = new_tier(queue_bytes=3 * BLOCK_BYTES)
    begin = time.monotonic()
    for number in range(8):
        tier.put(key(number), tokens(number), payload(number))
    assert time.monotonic() - begin < 5  # nobody waited for the disk
    go_on.set()
    tier.flush()
    assert (tier.stats().drops, tier.stats().errors) == (5, 0)
    assert held(tier, *range(8)) == [0, 1, 2]


def test_the_budget_holds_for_what_is_written_and_for_what_is_found(new_tier, tmp_path):
    tier = new_tier(3)
    put(tier, 1, 2, 3)
    tier.touch([key(1)])
    assert has(tier, 2)  # no use
    put(tier, 4)
    assert held(tier, 1, 2, 3, 4) == [1, 3, 4]
    tier.touch([key(1), key(4), key(3)])
    tier.close()
    assert tier.stats().evictions == 1
    # A restart knows files by their times.
    for age, number in enumerate((4, 1, 3)):
        os.utime(path_of(tmp_path, number), (1000 - age, 1000 - age))
    again = new_tier(2)
    assert held(again, 1, 3, 4) == [1, 4]
    assert len(list((tmp_path / "blocks").iterdir())) == 2


def test_a_use_makes_a_block_younger_for_the_next_process(new_tier, tmp_path):
    put(new_tier(), 1, 2, 3)
    for number in (1, 2, 3):
        os.utime(path_of(tmp_path, number), (1000 + number, 1000 + number))
    assert has(new_tier(), 1)
    assert held(new_tier(2), 1, 2, 3) == [1, 3]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_miss_one_error_and_one_line(new_tier, tmp_path, caplog, damage):
    put(new_tier(), 1, 2)
    tier, path = new_tier(), path_of(tmp_path, 1)
    data = bytearray(path.read_bytes())
    assert len(data) == FILE_BYTES
    DAMAGES[damage](data)
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert held(tier, 1, 2) == [2]
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.errors) == (1, 1, 1)
    assert [path.name in line for line in caplog.messages] == [True]
    assert not path.exists() and held(new_tier(), 1, 2) == [2]
    put(tier, 1)  # computed again
    assert has(tier, 1)


def test_every_single_flipped_bit_is_found_out(new_tier, tmp_path, caplog):
    put(new_tier(), 1)
    path = path_of(tmp_path, 1)
    whole = path.read_bytes()
    places = [*range(96), *np.random.default_rng(0).integers(96, FILE_BYTES, 60).tolist()]
    out = np.zeros(BLOCK_BYTES, np.uint8)
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(block_format.BadBlock):
            block_file.read_block(path, key(1), tokens(1), out)


@pytest.mark.parametrize("most", [1, 7, 100])
def test_a_file_that_comes_in_pieces_is_put_together(new_tier, monkeypatch, most):
    tier, all_at_once = new_tier(), os.readv
    put(tier, 1)
    tier.flush()

    def some(descriptor, views):
        return all_at_once(descriptor, [views[0][:most]])

    monkeypatch.setattr(os, "readv", some)
    assert held(tier, 1) == [1]


def test_a_file_that_ends_while_it_is_read_is_a_miss(new_tier, tmp_path, monkeypatch, caplog):
    tier, all_at_once = new_tier(), os.readv
    put(tier, 1)
    tier.flush()

    def cut_off(descriptor, views):
        os.truncate(path_of(tmp_path, 1), 10)
        return all_at_once(descriptor, views)

    monkeypatch.setattr(os, "readv", cut_off)
    assert held(tier, 1) == []
    assert "became shorter" in caplog.text


def test_another_blocks_file_under_this_name_is_a_miss(new_tier, tmp_path, caplog):
    """Of another model, say, with the same tokens: its key says so."""
    tier = new_tier()
    tier.put(key(2), tokens(1), payload(2))
    tier.close()
    shutil.copy(path_of(tmp_path, 2), path_of(tmp_path, 1))
    assert held(new_tier(), 1) == []
    assert len(caplog.messages) == 1


def test_a_file_that_another_process_removed_is_a_miss_and_no_error(new_tier, tmp_path, caplog):
    tier = new_tier()
    put(tier, 1, 2)
    path_of(tmp_path, 1).unlink()
    assert held(tier, 1, 2) == [2]
    assert (tier.stats().misses, tier.stats().errors, caplog.messages) == (1, 0, [])
    put(tier, 1)
    assert has(tier, 1)


def test_a_full_disk_costs_one_line_and_the_files_before_it_stay(new_tier, tmp_path, caplog):
    """A limit on the size of files stands in for a full disk: the write itself fails half way."""
    tier = new_tier()
    put(tier, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES // 2, limits[1]))
        put(tier, 2, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert held(tier, 1, 2, 3) == [1]
    assert tier.stats().errors == 2
    assert ["cannot be written" in line for line in caplog.messages] == [True]
    assert [path.name for path in (tmp_path / "blocks").iterdir()] == [f"{key(1).hex()}.kv"]
    put(tier, 2)  # there is room again
    assert held(tier, 1, 2) == [1, 2]


def test_no_space_left_is_no_error_for_anybody(new_tier, monkeypatch, caplog):
    def full(*args) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    tier = new_tier()
    put(tier, 1, 2)
    assert held(tier, 1, 2) == [] and tier.stats().errors == 2
    assert len(caplog.messages) == 1 and "No space left" in caplog.text


def test_a_read_only_folder_is_read(new_tier, monkeypatch, caplog):
    put(new_tier(), 1)

    def refuse(*args, **kwargs) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    tier = new_tier()
    monkeypatch.setattr("builtins.open", _only_reading(open, refuse))
    for name in ("replace", "unlink", "utime"):
        monkeypatch.setattr(os, name, refuse)
    put(tier, 2, 3)
    assert held(tier, 1, 2, 3) == [1]
    assert tier.stats().errors == 2 and len(caplog.messages) == 1


def _only_reading(real_open, refuse):
    return lambda path, mode="r", *args, **kwargs: (
        real_open(path, mode, *args, **kwargs) if "r" in mode else refuse()
    )


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        DiskTier(tmp_path / "file" / "blocks", budget_bytes=1 << 20, **SIZES)
    with pytest.raises(ValueError, match="no block"):
        DiskTier(tmp_path / "blocks", budget_bytes=FILE_BYTES - 1, **SIZES)


def test_a_folder_that_vanishes_is_no_error_for_anybody(new_tier, tmp_path, caplog):
    tier = new_tier()
    put(tier, 1)
    shutil.rmtree(tmp_path / "blocks")
    put(tier, 2)
    assert held(tier, 1, 2) == []
    assert tier.stats().errors == 1 and len(caplog.messages) == 1


def test_scraps_of_dead_processes_go_and_other_files_stay(new_tier, tmp_path):
    put(new_tier(), 1)
    folder = tmp_path / "blocks"
    for name in ("old.tmp", "young.tmp", "notes.txt", "ab.kv", "z" * 64 + ".kv"):
        (folder / name).touch()
    (folder / f"{'cd' * 32}.kv").mkdir()
    os.utime(folder / "old.tmp", (0, 0))
    tier = new_tier()
    assert tier.stats().num_blocks == 1
    names = {path.name for path in folder.iterdir()}
    assert "old.tmp" not in names and len(names) == 6
    tier.clear()
    assert {path.name for path in folder.iterdir()} == names - {f"{key(1).hex()}.kv"}
    assert held(tier, 1) == []
    put(tier, 2)
    assert has(tier, 2)
