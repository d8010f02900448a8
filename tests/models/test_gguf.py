"""GGUF files: what is read, in which order of rows, and that hostile files end in one error."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from octavo.models.gguf_io import GgufSource, hf_name
from octavo.models.rope import apply_rope
from octavo.models.weights import WeightsError

RNG = np.random.default_rng(0)


def write_gguf(
    path: Path, tensors: dict, arch: str = "llama", metadata: dict | None = None
) -> Path:
    """Write with the package's writer; a value is an array, or (array, quantisation type)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata or {}).items():
        writer.add_uint32(f"{arch}.attention.{key}", value)
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        data = array if kind is None else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of GGUF's llama files: (i, i + H/2) become neighbours in each head."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_reads_and_dequantises_what_the_package_wrote(tmp_path, kind):
    array = floats(6, 256)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (array, Kind[kind])})
    source = GgufSource(path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert source.shapes == {name: (6, 256)}
    expected = gguf.quants.dequantize(gguf.quants.quantize(array, Kind[kind]), Kind[kind])
    np.testing.assert_array_equal(source.read(name), expected)
    assert source.read(name).dtype == source.dtypes[name] == np.float32


def test_the_header_reads_as_the_package_reads_it(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    values = {
        "uint8": 250, "int8": -3, "uint16": 65_000, "int16": -300, "uint32": 4_000_000_000,
        "int32": -70_000, "uint64": 2**63, "int64": -(2**40), "float32": 0.5, "float64": 0.1,
        "bool": True, "string": "für 日本 😀",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.words", ["a", "", "é"])
    writer.add_array("x.numbers", [1, -2, 3])
    writer.add_array("x.floats", [0.5, 1.5])
    writer.add_tensor("output_norm.weight", floats(5))
    writer.add_tensor("token_embd.weight", floats(3, 5))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    source, reader = GgufSource(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert source.metadata == fields
    assert values.items() <= {k[2:]: v for k, v in source.metadata.items()}.items()
    for tensor in reader.tensors:
        np.testing.assert_array_equal(source.read(hf_name(tensor.name)), tensor.data)
        assert source.tensors[tensor.name].start == tensor.data_offset


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.3.attn_norm.weight", "model.layers.3.input_layernorm.weight"),
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.00.ffn_down.weight", "blk.00.ffn_down.weight"),
        ("blk.0.ssm_a.weight", "blk.0.ssm_a.weight"),
        ("blk.x.ffn_down.weight", "blk.x.ffn_down.weight"),
        ("ffn_down.weight", "ffn_down.weight"),
    ],
)
def test_tensors_get_their_hugging_face_names_and_unknown_ones_keep_theirs(name, expected):
    assert hf_name(name) == expected


HEADS, KV_HEADS, HEAD_SIZE, WIDTH = 4, 2, 8, 32
ATTENTION = {
    "attn_q.weight": (floats(HEADS * HEAD_SIZE, WIDTH), HEADS),
    "attn_k.weight": (floats(KV_HEADS * HEAD_SIZE, WIDTH), KV_HEADS),
    "attn_v.weight": (floats(KV_HEADS * HEAD_SIZE, WIDTH), None),
    "attn_q.bias": (floats(HEADS * HEAD_SIZE), HEADS),
    "attn_k.bias": (floats(KV_HEADS * HEAD_SIZE), KV_HEADS),
    "attn_v.bias": (floats(KV_HEADS * HEAD_SIZE), None),
    "attn_output.weight": (floats(WIDTH, HEADS * HEAD_SIZE), None),
}


@pytest.mark.parametrize(("arch", "permuted"), [("llama", True), ("qwen2", False)])
def test_rotary_rows_come_in_hugging_face_order(tmp_path, arch, permuted):
    stored = {
        f"blk.0.{name}": interleaved(rows, heads) if permuted and heads else rows
        for name, (rows, heads) in ATTENTION.items()
    }
    counts = {"head_count": HEADS, "head_count_kv": KV_HEADS}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", stored, arch, counts))
    for name, (rows, _) in ATTENTION.items():
        np.testing.assert_array_equal(source.read(hf_name(f"blk.0.{name}")), rows)


def test_half_rotation_of_the_read_rows_equals_interleaved_rotation_of_the_stored_ones(tmp_path):
    stored = {f"blk.0.attn_{x}.weight": floats(HEAD_SIZE, WIDTH) for x in "qk"}
    counts = {"head_count": 1, "head_count_kv": 1}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", stored, metadata=counts))
    x = floats(5, WIDTH)  # [T, D]
    angles = np.arange(5)[:, None] * 100.0 ** -np.linspace(0, 1, HEAD_SIZE // 2)  # [T, H/2]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def interleaved_rotation(y: np.ndarray) -> np.ndarray:
        even, odd = y[:, 0::2], y[:, 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(y.shape)

    q, k = (interleaved_rotation(x @ rows.T) for rows in stored.values())
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk"]
    rotated = [
        apply_rope(jnp.asarray(x @ source.read(n).T)[:, None], jnp.asarray(cos), jnp.asarray(sin))
        for n in names
    ]
    scores = np.asarray(rotated[0][:, 0] @ rotated[1][:, 0].T)
    np.testing.assert_allclose(scores, q @ k.T, rtol=1e-4, atol=1e-4)


def test_rope_factors_are_a_setting_and_not_a_weight(tmp_path):
    tensors = {"rope_freqs.weight": floats(4), "output_norm.weight": floats(8)}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tensors))
    assert list(source.shapes) == ["model.norm.weight"]
    factors = source.rope_factors()
    assert factors is not None
    np.testing.assert_array_equal(factors, tensors["rope_freqs.weight"])


def text(value: str | bytes, *, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "t", dims: tuple = (4,), kind: int = 0, start: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, start)


def raw_file(
    *entries: bytes,
    keys: int = 0,
    tensors: int | None = None,
    data: bytes = bytes(16),
    version: int = 3,
    magic: bytes = b"GGUF",
) -> bytes:
    """A file of `entries`, the first `keys` of them metadata; counts may be lied about."""
    count = len(entries) - keys if tensors is None else tensors
    head = magic + struct.pack("<IQQ", version, count, keys) + b"".join(entries)
    return head + bytes(-len(head) % 32) + data


def array(item: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + items


GOOD = raw_file(key("general.name", 8, text("x")), tensor(), keys=1)
HOSTILE = {
    "empty": (b"", "the file is empty"),
    "two bytes": (b"GG", "the magic takes 4 bytes, but only 2 are left"),
    "bad magic": (raw_file(magic=b"GGML"), "starts with b'GGML', expected b'GGUF'"),
    "version 1": (raw_file(version=1), r"GGUF version 1, expected one of \(2, 3\)"),
    "version 4": (raw_file(version=4), "GGUF version 4"),
    "big-endian": (raw_file(version=3 << 24), "big-endian files are not supported"),
    "header only": (b"GGUF" + struct.pack("<I", 3), "the number of tensors takes 8 bytes"),
    "tensor count": (raw_file(tensors=2**63), "number of tensors is 9223372036854775808, more"),
    "tensor count past the entries": (raw_file(tensor(), tensors=2), "tensor .. has 0 dimensions"),
    "key count": (raw_file(keys=2**40, tensors=0), "number of metadata keys is 1099511627776"),
    "key length": (raw_file(text("k", length=2**62), keys=1), "key takes 4611686018427387904"),
    "key not UTF-8": (raw_file(key(b"\xff", 4, bytes(4)), keys=1), "key is not UTF-8"),
    "duplicate key": (raw_file(*[key("k", 4, bytes(4))] * 2, keys=2), "'k' appears twice"),
    "value type": (raw_file(key("k", 13, b""), keys=1), "k has the unknown value type 13"),
    "string length": (raw_file(key("k", 8, text("", length=999)), keys=1), "k takes 999 bytes"),
    "string not UTF-8": (raw_file(key("k", 8, text(b"\xc3")), keys=1), "k is not UTF-8"),
    "array length": (raw_file(key("k", 9, array(4, 2**61)), keys=1), "length of k is 23058430"),
    "array of strings": (raw_file(key("k", 9, array(8, 2**61)), keys=1), "length of k is 230584"),
    "array of arrays": (raw_file(key("k", 9, array(9, 1)), keys=1), "unsupported item type 9"),
    "array item type": (raw_file(key("k", 9, array(77, 1)), keys=1), "unsupported item type 77"),
    "alignment zero": (
        raw_file(key("general.alignment", 4, bytes(4)), keys=1),
        "alignment=0 must be a power of two",
    ),
    "alignment 24": (
        raw_file(key("general.alignment", 4, b"\x18\0\0\0"), keys=1),
        "alignment=24 must be",
    ),
    "alignment is text": (
        raw_file(key("general.alignment", 8, text("32")), keys=1),
        "alignment='32' must be",
    ),
    "alignment past the file": (
        raw_file(key("general.alignment", 4, struct.pack("<I", 1 << 31)), tensor(), keys=1),
        "'t' takes bytes 2147483648 to",
    ),
    "duplicate tensor": (
        raw_file(tensor(), tensor(start=32), data=bytes(64)),
        "tensor 't' appears twice",
    ),
    "no dimensions": (raw_file(tensor(dims=())), "'t' has 0 dimensions"),
    "five dimensions": (raw_file(tensor(dims=(1,) * 5)), "'t' has 5 dimensions"),
    "rank past the file": (
        raw_file(text("t") + struct.pack("<I", 2**31)),
        "'t' has 2147483648 dimensions",
    ),
    "size zero": (raw_file(tensor(dims=(4, 0))), r"shape \(4, 0\)"),
    "product past 64 bits": (raw_file(tensor(dims=(2**62, 2**62))), "the file ends at"),
    "unknown type": (raw_file(tensor(kind=999)), "'t' has the unknown quantisation type 999"),
    "removed type": (raw_file(tensor(kind=4)), "'t' has the unknown quantisation type 4"),
    "half a block": (raw_file(tensor(dims=(31,), kind=2)), "Q4_0 .* multiple of 32"),
    "data past the end": (raw_file(tensor(dims=(5,))), r"'t' takes bytes .* \(is it cut short"),
    "offset past the end": (raw_file(tensor(start=2**63)), "'t' takes bytes 92233720368547758"),
    "offset unaligned": (raw_file(tensor(start=4), data=bytes(64)), "starts at 4, expected a mul"),
    "overlap": (
        raw_file(tensor("a", dims=(9,)), tensor("b", start=32), data=bytes(64)),
        "'a' and 'b' overlap",
    ),
    "two names for one": (
        raw_file(tensor("output.weight"), tensor("lm_head.weight", start=32), data=bytes(64)),
        "'output.weight' and 'lm_head.weight' mean the same",
    ),
}


def write(directory: Path, data: bytes) -> Path:
    path = directory / "m.gguf"
    path.write_bytes(data)
    return path


def test_the_file_that_hostile_ones_are_made_from_is_good(tmp_path):
    source = GgufSource(write(tmp_path, GOOD))
    assert source.metadata == {"general.name": "x"}
    assert source.shapes == {"t": (4,)}


@pytest.mark.parametrize("case", HOSTILE)
def test_refuses_a_hostile_file_with_an_error_that_names_it(tmp_path, case):
    data, message = HOSTILE[case]
    with pytest.raises(WeightsError, match=message) as error:
        GgufSource(write(tmp_path, data))
    assert "m.gguf" in str(error.value)


def test_no_damage_to_the_header_leads_to_anything_but_a_weights_error(tmp_path):
    for position in range(len(GOOD) - 16):
        for value in (0, 1, 8, 9, 0x7F, 0xFF):
            damaged = bytearray(GOOD)
            damaged[position] = value
            try:
                source = GgufSource(write(tmp_path, bytes(damaged)))
                arrays = [source.read(name) for name in source.shapes]
            except WeightsError:
                continue
            assert all(array.nbytes <= 64 for array in arrays)
    for length in range(len(GOOD)):
        with pytest.raises(WeightsError):
            GgufSource(write(tmp_path, GOOD[:length]))


def test_a_header_that_promises_much_takes_no_memory(tmp_path):
    promises = [
        raw_file(tensor(dims=(2**38,))),
        raw_file(key("k", 8, text("", length=2**38)), keys=1),
        raw_file(key("k", 9, array(8, 2**38)), keys=1),
        raw_file(tensors=2**38),
    ]
    tracemalloc.start()
    for data in promises:
        with pytest.raises(WeightsError):
            GgufSource(write(tmp_path, data))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_rotary_rows_that_do_not_fit_the_heads_are_an_error(tmp_path):
    tensors = {"blk.0.attn_q.weight": floats(6, 4)}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tensors, metadata={"head_count": 4}))
    with pytest.raises(WeightsError, match=r"6 rows, expected a multiple of twice .*head_count=4"):
        source.read("model.layers.0.self_attn.q_proj.weight")


def test_a_type_that_cannot_be_dequantised_is_an_error_that_names_the_tensor(tmp_path):
    path = write(tmp_path, raw_file(tensor(kind=Kind.I32)))
    with pytest.raises(WeightsError, match=r"'t'.*I32"):
        GgufSource(path).read("t")
