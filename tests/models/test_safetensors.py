"""Safetensors directories: what is read, and that hostile files end in one clear error."""

import json
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.models.safetensors_io import SafetensorsSource
from octavo.models.weights import WeightsError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(np.float16),
    "c": np.arange(8).astype(ml_dtypes.bfloat16).reshape(2, 2, 2),
    "ids": np.arange(3, dtype=np.int64),
    "nothing": np.zeros((0, 4), np.float32),
}


def raw_file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a safetensors file; `header` is JSON text or a value to encode."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(directory: Path, data: bytes) -> Path:
    (directory / "model.safetensors").write_bytes(data)
    return directory


def test_reads_what_the_library_wrote(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.shapes == {name: array.shape for name, array in TENSORS.items()}
    assert source.dtypes == {name: array.dtype for name, array in TENSORS.items()}
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(source.read(name), array)
        assert not source.read(name).flags.writeable


def shard(directory: Path, shards: dict[str, dict], weight_map: object = None) -> Path:
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


SHARDS = {"one.safetensors": {"a": TENSORS["a"]}, "two.safetensors": {"b": TENSORS["b"]}}


def test_reads_every_shard_that_the_index_names(tmp_path):
    source = SafetensorsSource(shard(tmp_path, SHARDS))
    assert [path.name for path in source.files] == ["one.safetensors", "two.safetensors"]
    np.testing.assert_array_equal(source.read("a"), TENSORS["a"])
    np.testing.assert_array_equal(source.read("b"), TENSORS["b"])


def test_shards_may_be_symbolic_links_as_in_the_hugging_face_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    save_file(TENSORS, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(blobs / "0123")
    assert set(SafetensorsSource(snapshot).shapes) == set(TENSORS)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "missing.*three.safetensors"),
        ({"a": "one.safetensors", "b": "../two.safetensors"}, "in the same directory"),
        ({"a": "one.safetensors", "b": "/two.safetensors"}, "in the same directory"),
        ({"a": "one.safetensors", "b": "..\\two.safetensors"}, "in the same directory"),
        ({"a": "one.safetensors", "b": 3}, "in the same directory"),
        ({"a": "one.safetensors", "b": "two.bin"}, r"\.safetensors file"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' is said to be in one"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "'a' is said to be in two"),
        (
            {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
            "'c' is said to be in two.*but is in None",
        ),
        ({"a": "one.safetensors", "x": "two.safetensors"}, "'[bx]' is said to be in"),
        ([], "expected a weight_map"),
        ({}, "expected a weight_map"),
    ],
)
def test_refuses_an_index_that_does_not_match_the_shards(tmp_path, weight_map, message):
    with pytest.raises(WeightsError, match=message):
        SafetensorsSource(shard(tmp_path, SHARDS, weight_map))


def test_refuses_a_tensor_in_two_shards(tmp_path):
    more = {"one.safetensors": TENSORS, "two.safetensors": {"a": TENSORS["a"]}}
    weight_map = dict.fromkeys(TENSORS, "one.safetensors") | {"a": "two.safetensors"}
    with pytest.raises(WeightsError, match=r"'a' is both in one.safetensors and in two"):
        SafetensorsSource(shard(tmp_path, more, weight_map))


HOSTILE = {
    "empty": (b"", "empty"),
    "shorter than a length": (b"\1\2\3", "3 bytes, too short"),
    "header over the limit": (
        struct.pack("<Q", 100_000_001) + b"{}",
        "100000001 bytes, expected at most 100000000",
    ),
    "header past the end": (raw_file({}, length=50), "50 bytes, but only 2 bytes follow"),
    "largest length": (raw_file({}, length=2**64 - 1), "header of 18446744073709551615 bytes"),
    "not JSON": (raw_file(b"{nope"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not valid JSON"),
    "deeply nested": (raw_file(b"[" * 100_000), "not valid JSON"),
    "a number of 10,000 digits": (raw_file(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "a list": (raw_file([]), "expected a JSON object, found list"),
    "duplicate tensor": (
        raw_file(b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "'a' appears twice",
    ),
    "duplicate field": (raw_file(b'{"a": {"dtype": 1, "dtype": 2}}'), "'dtype' appears twice"),
    "entry is no object": (raw_file({"a": 3}), "'a': expected dtype, shape and data_offsets"),
    "entry lacks a field": (raw_file({"a": {"dtype": "F32"}}), "expected dtype, shape"),
    "unknown dtype": (raw_file({"a": entry("F31")}, bytes(8)), "unknown dtype='F31'"),
    "dtype is a list": (raw_file({"a": entry(["F32"])}, bytes(8)), "unknown dtype"),
    "negative size": (raw_file({"a": entry(shape=[-2])}, bytes(8)), r"shape=\[-2\] must be"),
    "fractional size": (raw_file({"a": entry(shape=[2.0])}, bytes(8)), r"shape=\[2.0\]"),
    "boolean size": (raw_file({"a": entry(shape=[True, 2])}, bytes(8)), r"shape=\[True, 2\]"),
    "size past 64 bits": (raw_file({"a": entry(shape=[2**64])}, bytes(8)), "shape="),
    "product past 64 bits": (
        raw_file({"a": entry(shape=[2**40, 2**40])}, bytes(8)),
        "hold 8 bytes.*takes 4835703278458516698824704",
    ),
    "too many dimensions": (raw_file({"a": entry(shape=[1] * 9)}, bytes(4)), "at most 8"),
    "offsets out of the file": (raw_file({"a": entry(offsets=[0, 8])}, bytes(7)), "the 7 bytes"),
    "offsets reversed": (raw_file({"a": entry(offsets=[8, 0])}, bytes(8)), "in order within"),
    "offsets negative": (raw_file({"a": entry(offsets=[-8, 0])}, bytes(8)), "two integers"),
    "three offsets": (raw_file({"a": entry(offsets=[0, 4, 8])}, bytes(8)), "two integers"),
    "offsets do not match the shape": (
        raw_file({"a": entry(shape=[3])}, bytes(8)),
        r"hold 8 bytes, but F32 \[3\] takes 12",
    ),
    "overlap": (
        raw_file({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        "'b' overlaps 'a'",
    ),
    "same bytes twice": (raw_file({"a": entry(), "b": entry()}, bytes(8)), "'b' overlaps 'a'"),
    "hole": (raw_file({"a": entry(offsets=[4, 12])}, bytes(12)), "'a' leaves a hole after"),
    "trailing bytes": (raw_file({"a": entry()}, bytes(9)), "1 bytes follow the last tensor 'a'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_refuses_a_hostile_file_with_an_error_that_names_it(tmp_path, case):
    data, message = HOSTILE[case]
    with pytest.raises(WeightsError, match=message) as error:
        SafetensorsSource(write(tmp_path, data))
    assert "model.safetensors" in str(error.value)


def test_no_damage_to_the_header_leads_to_anything_but_a_weights_error(tmp_path):
    good = raw_file({"a": entry(), "b": entry("F16", [2, 2], [8, 16])}, bytes(16))
    for position in range(len(good) - 16):
        for value in (0, 0x20, 0x39, 0x7F, 0xFF):
            damaged = bytearray(good)
            damaged[position] = value
            try:
                source = SafetensorsSource(write(tmp_path, bytes(damaged)))
                arrays = [source.read(name) for name in source.shapes]
            except WeightsError:
                continue
            assert sum(array.nbytes for array in arrays) == 16
    for length in range(len(good)):
        with pytest.raises(WeightsError):
            SafetensorsSource(write(tmp_path, good[:length]))


def test_a_header_that_promises_much_takes_no_memory(tmp_path):
    size = 2**40
    write(tmp_path, raw_file({"a": entry(shape=[size // 4], offsets=[0, size])}, bytes(64)))
    tracemalloc.start()
    with pytest.raises(WeightsError):
        SafetensorsSource(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_directory_without_weights_is_an_error_that_says_what_was_looked_for(tmp_path):
    with pytest.raises(WeightsError, match=r"neither model.safetensors nor .*index.json"):
        SafetensorsSource(tmp_path)
