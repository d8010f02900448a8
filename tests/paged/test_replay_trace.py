"""Reading request logs: both forms mean the same thing, and nothing that is wrong gets through."""

import json

import numpy as np
import pytest

from octavo.paged.replay import TraceBuilder, TraceError, read_trace

MOONCAKE = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}


def write(path, *lines):
    path = path / "trace.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def mooncake(*ids, **more):
    return {**MOONCAKE, "input_length": 512 * len(ids), "hash_ids": ids, **more}


def blocks(trace):
    return [trace.blocks(r).tolist() for r in range(trace.num_requests)]


def test_a_mooncake_trace_is_one_symbol_for_every_id(tmp_path):
    first = mooncake(100, 5, 2**200, -3, input_length=3 * 512 + 1)
    trace = read_trace(write(tmp_path, first, mooncake(100, 5), mooncake(9)))
    assert blocks(trace) == [[0, 1, 2, 3], [0, 1], [4]]
    assert trace.num_tokens.tolist() == [1537, 1024, 512]
    assert trace.num_blocks.tolist() == [4, 2, 1]
    assert (trace.tokens_per_block, trace.num_symbols) == (512, 5)
    assert (trace.symbols.dtype, trace.namespaces.tolist()) == (np.int32, [0, 0, 0])


def test_tokens_are_cut_into_full_blocks_that_know_their_prefix(tmp_path):
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [3, 4], [3, 4, 3, 4], [1], [1, 2, 3, 4]]
    trace = read_trace(write(tmp_path, *({"tokens": p} for p in prompts)), block_size=2)
    assert blocks(trace) == [[0, 1], [0, 2], [3], [3, 4], [], [0, 1]]
    assert trace.num_tokens.tolist() == [5, 4, 2, 4, 1, 4]
    assert (trace.tokens_per_block, trace.num_symbols) == (2, 5)


def test_blocks_have_16_tokens_by_default(tmp_path):
    trace = read_trace(write(tmp_path, {"tokens": list(range(40))}))
    assert (blocks(trace), trace.tokens_per_block) == ([[0, 1]], 16)


def test_both_forms_of_the_same_requests_are_the_same_trace(tmp_path):
    rng = np.random.default_rng(0)
    content = rng.integers(0, 2**31, (6, 512))
    paths = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]]
    by_id = read_trace(write(tmp_path, *(mooncake(*path) for path in paths)))
    tokens = ({"tokens": content[path].ravel().tolist()} for path in paths)
    by_tokens = read_trace(write(tmp_path, *tokens), block_size=512)
    assert blocks(by_id) == blocks(by_tokens)
    for field in ("symbols", "offsets", "num_tokens", "namespaces"):
        np.testing.assert_array_equal(getattr(by_id, field), getattr(by_tokens, field))


def test_namespaces_and_salts_share_nothing(tmp_path):
    keys = [{}, {"namespace": "a"}, {"cache_salt": "a"}, {"namespace": "a", "cache_salt": "müller"}]
    keys += [{"namespace": 1}, {"namespace": "1"}, {"namespace": None}, {"namespace": "a"}]
    trace = read_trace(write(tmp_path, *({"tokens": [1, 2], **k} for k in keys)), block_size=2)
    assert trace.namespaces.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert blocks(trace) == [[0], [1], [2], [3], [4], [5], [0], [1]]


def test_timestamps_order_the_requests(tmp_path):
    lines = [{"tokens": [i], "timestamp": when} for i, when in enumerate([3, 1.5, 3, 0])]
    trace = read_trace(write(tmp_path, *lines), block_size=1)
    assert blocks(trace) == [[3], [1], [0], [2]]


def test_blank_lines_and_other_line_ends_are_no_requests(tmp_path):
    line = json.dumps(MOONCAKE)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"\n{line}\r\n\r\n{line}\n\n".encode())
    assert read_trace(path).num_requests == 2


@pytest.mark.parametrize("content", ["", "\n", "  \n\n"])
def test_an_empty_trace_is_an_error(tmp_path, content):
    with pytest.raises(TraceError, match="found no request") as error:
        read_trace(write(tmp_path, content))
    assert error.value.line == 0


TOKENS = {"tokens": [1, 2]}
WRONG_LINES = [
    # not an object
    ('{"timestamp": 0, "input_length": 1000, "hash_', "cut off"),
    ("[1, 2]", "found [1, 2]"),
    ("null", "found None"),
    ("hello", "'hello'"),
    ("[" * 100_000, "JSON object"),
    ("\x00\x00", "JSON object"),
    ('{"tokens": [' + "9" * 5000 + "]}", "JSON object"),
    # not a request
    ({}, "'tokens' or 'hash_ids'"),
    ({"prompt": "hello"}, "prompt"),
    ({**MOONCAKE, "tokens": [1]}, "unknown key 'tokens'"),
    ({**MOONCAKE, "chat_id": 3}, "unknown key 'chat_id'"),
    ({**TOKENS, "größe": 3}, "unknown key 'größe'"),
    ({**TOKENS, "input_length": 2}, "unknown key 'input_length'"),
    # Mooncake's fields
    ({"hash_ids": [1]}, "no 'input_length'"),
    ({**MOONCAKE, "hash_ids": [7]}, "1 hash_ids for input_length=1000; expected 2"),
    ({**MOONCAKE, "hash_ids": [7, 8, 9]}, "3 hash_ids"),
    ({**MOONCAKE, "hash_ids": []}, "0 hash_ids"),
    ({**MOONCAKE, "hash_ids": None}, "hash_ids=None"),
    ({**MOONCAKE, "hash_ids": [7, "8"]}, "hash_ids=[7, '8']"),
    ({**MOONCAKE, "hash_ids": [7, True]}, "list of integers"),
    ({**MOONCAKE, "hash_ids": [7, 8.0]}, "list of integers"),
    ({**MOONCAKE, "input_length": 0, "hash_ids": []}, "input_length=0"),
    ({**MOONCAKE, "input_length": -1000}, "input_length=-1000"),
    ({**MOONCAKE, "input_length": 1000.0}, "input_length=1000.0"),
    ({**MOONCAKE, "input_length": "1000"}, "input_length='1000'"),
    ({**MOONCAKE, "input_length": 10**100}, "an integer from 1 to 2147483647"),
    # tokens
    ({"tokens": []}, "at least one token"),
    ({"tokens": "hello"}, "tokens='hello'"),
    ({"tokens": [1, 2.5]}, "tokens=[1, 2.5]"),
    ({"tokens": [1, None]}, "tokens=[1, None]"),
    ({"tokens": [1, True]}, "tokens=[1, True]"),
    ({"tokens": [1, -2]}, "token -2"),
    ({"tokens": [1, 2**31]}, "token 2147483648"),
    ({**TOKENS, "namespace": ["a"]}, "namespace=['a']"),
    ({**TOKENS, "cache_salt": 1.5}, "cache_salt=1.5"),
    ({**TOKENS, "namespace": True}, "namespace=True"),
    # what both may have
    ({**MOONCAKE, "output_length": -1}, "output_length=-1"),
    ({**TOKENS, "output_length": None}, "output_length=None"),
    ({**TOKENS, "timestamp": "noon"}, "timestamp='noon'"),
    ({**TOKENS, "timestamp": None}, "timestamp=None"),
    ({**TOKENS, "timestamp": 10**400}, "timestamp=1000"),
    ('{"tokens": [1], "timestamp": NaN}', "timestamp=nan"),
    ('{"tokens": [1], "timestamp": -Infinity}', "timestamp=-inf"),
]


@pytest.mark.parametrize(("line", "words"), WRONG_LINES, ids=lambda value: str(value)[:40])
def test_a_wrong_line_is_named_with_what_is_wrong(tmp_path, line, words):
    path = write(tmp_path, "", line)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert words in str(error.value)
    assert str(error.value).startswith(f"{path}:2: found ")
    assert error.value.line == 2
    assert len(str(error.value)) < 500 + len(str(path))


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(MOONCAKE).encode() + b'\n{"tokens": [1], "namespace": "\xff"}\n')
    with pytest.raises(TraceError, match=r":2: found .*utf-8"):
        read_trace(path)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([MOONCAKE, {"tokens": [1], "timestamp": 0}], "'hash_ids' in every line, as in line 1"),
        ([{"tokens": [1]}, {"hash_ids": [1], "input_length": 1}], "'tokens' in every line"),
        ([{"tokens": [1]}, {"tokens": [1], "timestamp": 0}], "in all lines or in none"),
        ([{"tokens": [1], "timestamp": 0}, {"tokens": [1]}], "without 'timestamp'"),
    ],
)
def test_lines_of_different_forms_are_refused(tmp_path, lines, words):
    with pytest.raises(TraceError, match=words) as error:
        read_trace(write(tmp_path, *lines))
    assert error.value.line == 2


def test_the_last_line_is_checked_too(tmp_path):
    with pytest.raises(TraceError, match=":101:"):
        read_trace(write(tmp_path, *[MOONCAKE] * 100, '{"timestamp": 0, "input'))


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nothing.jsonl")


def test_a_builder_refuses_what_makes_no_trace():
    with pytest.raises(ValueError, match="tokens_per_block=0"):
        TraceBuilder(tokens_per_block=0)
    builder = TraceBuilder(tokens_per_block=4)
    with pytest.raises(ValueError, match="at least one request"):
        builder.build()
    with pytest.raises(ValueError, match="num_tokens=0"):
        builder.add([], num_tokens=0)
