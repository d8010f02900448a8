"""GGUF checkpoints, read through a memory map.

The header is read here and not by `gguf.GGUFReader`, for two reasons. It is untrusted: every
length is checked against the size of the file before it is used. And it is long: the reader of
the package makes several arrays per string of the vocabulary, which takes seconds for what takes
a fraction of one here. Dequantisation is the package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .weights import WeightsError, map_file

if TYPE_CHECKING:  # an optional dependency: imported where it is used
    from gguf.constants import GGMLQuantizationType

MAGIC = b"GGUF"
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies `[H/2]`: a setting that Llama 3 files keep as a tensor."""

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# Value types of the format, as codes of the struct module.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
# The smallest that an entry can be: an empty name, and a one-byte value or no dimensions.
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor in a GGUF file; an unknown name is returned as it is."""
    match = re.fullmatch(r"(?:blk\.(0|[1-9][0-9]*)\.)?([a-z_]+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name
    return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{kind}" if stem in _LAYER_NAMES else name


class _Cursor:
    """A position in an untrusted file that refuses to pass its end."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path, self.data, self.pos = path, data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.pos

    def fail(self, message: str) -> WeightsError:
        return WeightsError(f"{self.path}: {message} (at byte {self.pos})")

    def take(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise self.fail(f"{what} takes {size} bytes, but only {self.left} are left")
        start, self.pos = self.pos, self.pos + size
        return self.data[start : self.pos]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, min_bytes: int, what: str) -> int:
        value = self.number("Q", what)
        if value * min_bytes > self.left:
            raise self.fail(f"{what} is {value}, more than the {self.left} bytes left can hold")
        return value

    def string(self, what: str) -> str:
        raw = self.take(self.number("Q", f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from error

    def strings(self, count: int, what: str) -> list[str]:
        """As `string`, `count` times: a vocabulary has so many that calls would take long."""
        data, pos, texts, read_length = self.data, self.pos, [], struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = pos + 8
                end = start + read_length(data, pos)[0]
                if end > len(data):
                    raise ValueError("past the end")
                texts.append(data[start:end].decode("utf-8"))
                pos = end
        except (struct.error, ValueError):
            self.pos = pos
            self.string(what)  # says what is wrong
            raise
        self.pos = pos
        return texts

    def value(self, type_id: int, key: str) -> Any:
        if type_id == _STRING:
            return self.string(key)
        if type_id in _SCALARS:
            return self.number(_SCALARS[type_id], key)
        if type_id != _ARRAY:
            raise self.fail(f"{key} has the unknown value type {type_id}")
        item = self.number("I", f"the item type of {key}")
        if item == _STRING:
            length = self.count(8, f"the length of {key}")
            return self.strings(length, key)
        if item not in _SCALARS:
            # An array of arrays is allowed by the format; no model needs one.
            raise self.fail(f"{key} is an array of the unsupported item type {item}")
        code = _SCALARS[item]
        size = struct.calcsize("<" + code)
        length = self.count(size, f"the length of {key}")
        return list(struct.unpack(f"<{length}{code}", self.take(length * size, key)))


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies in a file. `shape` is in row-major order, in elements."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.fail(f"the metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.number("I", f"the type of {key}"), key)
    return metadata


def _read_tensor(cursor: _Cursor, name: str) -> GgufTensor:
    """Read one entry; `start` is still relative to the data."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    what = f"tensor {name!r}"
    num_dims = cursor.number("I", f"the rank of {what}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"{what} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, f"the shape of {what}"))
    kind_id, start = cursor.number("I", what), cursor.number("Q", what)
    try:
        kind = GGMLQuantizationType(kind_id)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise cursor.fail(f"{what} has the unknown quantisation type {kind_id}") from None
    if 0 in dims or dims[0] % block:
        raise cursor.fail(
            f"{what} of type {kind.name} has the shape {dims}; expected no zeros and a first size "
            f"that is a multiple of {block}"
        )
    size = math.prod(dims) // block * block_bytes
    return GgufTensor(shape=dims[::-1], kind=kind, start=start, num_bytes=size)


def _place_tensors(cursor: _Cursor, found: dict[str, GgufTensor], alignment: int) -> None:
    """Turn offsets into positions in the file, in place; check that they fit and are disjoint."""
    base = -(-cursor.pos // alignment) * alignment
    size = len(cursor.data)
    last_name, last_end = "", 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].start):
        start, end = base + tensor.start, base + tensor.start + tensor.num_bytes
        if tensor.start % alignment:
            raise WeightsError(
                f"{cursor.path}: tensor {name!r} starts at {tensor.start}, expected a multiple of "
                f"{alignment}"
            )
        if end > size:
            raise WeightsError(
                f"{cursor.path}: tensor {name!r} takes bytes {start} to {end}, but the file ends "
                f"at {size} (is it cut short?)"
            )
        if start < last_end:
            raise WeightsError(f"{cursor.path}: tensors {last_name!r} and {name!r} overlap")
        last_name, last_end = name, end
        found[name] = GgufTensor(
            shape=tensor.shape, kind=tensor.kind, start=start, num_bytes=tensor.num_bytes
        )


def _read_header(path: Path, data: mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(path, data)
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise WeightsError(f"{path}: starts with {magic!r}, expected {MAGIC!r}: not a GGUF file")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        hint = "; big-endian files are not supported" if version & 0xFFFF == 0 else ""
        raise WeightsError(f"{path}: GGUF version {version}, expected one of {_VERSIONS}{hint}")
    num_tensors = cursor.count(_MIN_TENSOR_BYTES, "the number of tensors")
    num_keys = cursor.count(_MIN_KEY_BYTES, "the number of metadata keys")
    metadata = _read_metadata(cursor, num_keys)
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.string("a tensor name")
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice")
        tensors[name] = _read_tensor(cursor, name)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise WeightsError(f"{path}: general.alignment={alignment!r} must be a power of two")
    _place_tensors(cursor, tensors, alignment)
    return metadata, tensors


class GgufSource:
    """The tensors of a GGUF file under their Hugging Face names, dequantised when read.

    Attributes:
        name: the path.
        files: the one file.
        metadata: the key-value pairs of the file; arrays are lists.
        tensors: by the name in the file.
        shapes, dtypes: by Hugging Face name; the dtype is always float32. `rope_freqs.weight` is
            a setting and not a weight, so it is only in `tensors`.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and check its header; no tensor is read.

        Raises:
            WeightsError: the file is broken or uses what is not supported.
        """
        self.name = str(path)
        self.files = (path,)
        self._data = map_file(path)
        self.metadata, self.tensors = _read_header(path, self._data)
        self._names: dict[str, str] = {}
        for name in self.tensors:
            if name == ROPE_FACTORS:
                continue
            if hf_name(name) in self._names:
                raise WeightsError(
                    f"{path}: tensors {self._names[hf_name(name)]!r} and {name!r} mean the same"
                )
            self._names[hf_name(name)] = name
        self.shapes = {hf: self.tensors[name].shape for hf, name in self._names.items()}
        self.dtypes = dict.fromkeys(self.shapes, np.dtype(np.float32))

    def rope_factors(self) -> np.ndarray | None:
        """`rope_freqs.weight` as `float32[H/2]`, or None."""
        return self._dequantize(ROPE_FACTORS, None) if ROPE_FACTORS in self.tensors else None

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, its rows in Hugging Face's order.

        Raises:
            WeightsError: the `gguf` package cannot dequantise the tensor's type.
        """
        stored = self._names[name]
        return self._dequantize(stored, self._rotary_heads(stored))

    def _rotary_heads(self, stored: str) -> int | None:
        # Files of the architecture "llama" pair dimensions (2i, 2i + 1) in the rotation, where
        # Hugging Face pairs (i, i + H/2): the rows of q and k are permuted within each head.
        if self.metadata.get("general.architecture") != "llama":
            return None
        key = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(stored.split(".")[-2])
        if key is None:
            return None
        heads = self.metadata.get("llama.attention.head_count")
        heads = self.metadata.get(f"llama.attention.{key}", heads)
        rows = self.tensors[stored].shape[0]
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
            raise WeightsError(
                f"{self.name}: tensor {stored!r} has {rows} rows, expected a multiple of twice "
                f"llama.attention.{key}={heads}"
            )
        return heads

    def _dequantize(self, stored: str, heads: int | None) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self.tensors[stored]
        data = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        try:
            values = dequantize(data.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise WeightsError(f"{self.name}: tensor {stored!r}: {error}") from error
        if heads is not None:
            pairs = tensor.shape[0] // (2 * heads)
            values = values.reshape(heads, pairs, 2, -1).swapaxes(1, 2)
        return values.reshape(tensor.shape)
