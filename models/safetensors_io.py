"""Safetensors checkpoints, read through a memory map.

The header of a file is untrusted. It is checked against the size of the file before any of its
numbers is used: https://huggingface.co/docs/safetensors/index#format.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .weights import WeightsError, map_file

MAX_JSON_BYTES = 100_000_000
"""Largest header or JSON file that is parsed; the format's own limit for headers."""

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse an untrusted JSON object; a key given twice is an error, not a choice.

    Raises:
        WeightsError: not JSON, not an object, or with duplicate keys; `where` starts the message.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most 100 MB.

    Raises:
        WeightsError: missing, too large, or not a JSON object.
    """
    data = map_file(path)
    if len(data) > MAX_JSON_BYTES:
        raise WeightsError(f"{path}: {len(data)} bytes of JSON, expected at most {MAX_JSON_BYTES}")
    return parse_json_object(data[:], str(path))


@dataclass(frozen=True, kw_only=True)
class _Entry:
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    end: int


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse_entry(where: str, entry: Any, data_start: int, file_size: int) -> _Entry:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise WeightsError(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WeightsError(f"{where}: unknown {dtype=}, expected one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, shape)):
        raise WeightsError(f"{where}: {shape=} must be at most 8 integers, none negative")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise WeightsError(f"{where}: data_offsets={offsets} must be two integers, none negative")
    begin, end = offsets
    available = file_size - data_start
    if not begin <= end <= available:
        raise WeightsError(
            f"{where}: data_offsets={offsets} must lie in order within the {available} bytes of "
            "data in the file (is it cut short?)"
        )
    needed = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != needed:
        raise WeightsError(
            f"{where}: data_offsets={offsets} hold {end - begin} bytes, but {dtype} {shape} "
            f"takes {needed}"
        )
    return _Entry(
        dtype=_DTYPES[dtype],
        shape=tuple(shape),
        start=data_start + begin,
        end=data_start + end,
    )


def _parse_header(path: Path, data: mmap) -> dict[str, _Entry]:
    size = len(data)
    if size < 8:
        raise WeightsError(f"{path}: {size} bytes, too short for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_JSON_BYTES:
        raise WeightsError(f"{path}: a header of {length} bytes, expected at most {MAX_JSON_BYTES}")
    if length > size - 8:
        raise WeightsError(f"{path}: a header of {length} bytes, but only {size - 8} bytes follow")
    header = parse_json_object(data[8 : 8 + length], f"{path}: header")
    header.pop("__metadata__", None)
    entries = {
        name: _parse_entry(f"{path}: tensor {name!r}", entry, 8 + length, size)
        for name, entry in header.items()
    }
    last_name, last_end = "the header", 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != last_end:
            what = "overlaps" if entry.start < last_end else "leaves a hole after"
            raise WeightsError(f"{path}: tensor {name!r} {what} {last_name!r}")
        last_name, last_end = name, entry.end
    if last_end != size:
        raise WeightsError(f"{path}: {size - last_end} bytes follow the last tensor {last_name!r}")
    return entries


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: expected a weight_map from tensor names to files")
    for name, shard in weight_map.items():
        # Symbolic links are allowed (the Hugging Face cache is made of them); paths are not.
        plain = isinstance(shard, str) and shard.endswith(".safetensors")
        if not plain or any(c in shard for c in "/\\:\0"):
            raise WeightsError(
                f"{path}: tensor {name!r} is said to be in {shard!r}; expected the name of a "
                ".safetensors file in the same directory"
            )
    return weight_map


class SafetensorsSource:
    """The tensors of a directory with `model.safetensors`, or its shards and their index.

    Args:
        directory: where the files are.
        stem: what they are called instead of `model`.

    Attributes:
        name: the directory.
        files: the safetensors files, in the order of their names.
        shapes, dtypes: by tensor name, as stored.
    """

    def __init__(self, directory: Path, *, stem: str = "model") -> None:
        """Map the files and check their headers; nothing else is read.

        Raises:
            WeightsError: files are missing, broken, or contradict each other.
        """
        self.name = str(directory)
        single = directory / f"{stem}.safetensors"
        index_path = directory / f"{stem}.safetensors.index.json"
        if single.exists():
            shards, weight_map = [single.name], None
        elif index_path.exists():
            weight_map = _read_index(index_path)
            shards = sorted(set(weight_map.values()))
            missing = [shard for shard in shards if not (directory / shard).is_file()]
            if missing:
                raise WeightsError(f"{index_path}: names files that are missing: {missing[:8]}")
        else:
            raise WeightsError(f"{directory}: has neither {single.name} nor {index_path.name}")
        self.files = tuple(directory / shard for shard in shards)
        self._where: dict[str, tuple[mmap, _Entry]] = {}
        found: dict[str, str] = {}
        for path in self.files:
            data = map_file(path)
            for name, entry in _parse_header(path, data).items():
                if name in found:
                    raise WeightsError(
                        f"{directory}: tensor {name!r} is both in {found[name]} and in {path.name}"
                    )
                found[name] = path.name
                self._where[name] = (data, entry)
        if weight_map is not None and found != weight_map:
            wrong = sorted(found.items() ^ weight_map.items())[0][0]
            raise WeightsError(
                f"{index_path}: tensor {wrong!r} is said to be in {weight_map.get(wrong)}, "
                f"but is in {found.get(wrong)}"
            )
        self.shapes = {name: entry.shape for name, (_, entry) in self._where.items()}
        self.dtypes = {name: entry.dtype for name, (_, entry) in self._where.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file, in the dtype that is stored."""
        data, entry = self._where[name]
        count = math.prod(entry.shape)
        flat = np.frombuffer(data, entry.dtype, count, entry.start)
        return flat.reshape(entry.shape)
