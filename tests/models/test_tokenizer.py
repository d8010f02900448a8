"""Tokenizers from both kinds of files, and text that streams without half characters."""

import itertools
import json
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.models.tokenizer import Tokenizer, TokenizerError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def metadata(*words: str, **changes: object) -> dict[str, object]:
    """GGUF metadata of a tokenizer that knows all bytes, and `words` (letters of the alphabet)."""
    tokens, merges = list(BYTES), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED]
    tokens += ["<s>", "</s>", "<tool>"]
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": merges,
        "token_type": types,
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text of each token, special tokens not added."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]


TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\ttab ",
    "I'll pay 12345.67€ in 2024",
    "naïve façade, Ünïcödé",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "mixed עברית and العربية",
    "\u0000control\u007f\ufffd",
    "def f(x):\n    return x ** 2  # ok\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_model_gives_every_text_back(smollm2, text):
    tokenizer = smollm2.tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_any_text_survives_the_round_trip_and_streams_to_itself(smollm2):
    tokenizer = smollm2.tokenizer
    # Its vocabulary lacks 21 bytes: of control characters, and of planes without characters.
    characters = st.characters(exclude_categories=["Cc", "Cs"], max_codepoint=0x3FFFF)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(characters))
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        stream = tokenizer.detokenizer(skip_special_tokens=False)
        assert "".join(stream.add([i]) for i in ids) + stream.flush() == text

    check()


def test_the_demo_model_splits_numbers_digit_by_digit(smollm2):
    assert pieces(smollm2.tokenizer, "In 2024, 98.6%") == [
        *("In", " ", "2", "0", "2", "4", ",", " ", "9", "8", ".", "6", "%")
    ]


def test_the_demo_model_tokenizes_as_its_reference_does(smollm2):
    # The first of the prompts whose logits were computed with Hugging Face transformers.
    expected = [3197, 284, 550, 4786, 1806]
    assert smollm2.tokenizer.encode(" software and other practical works") == expected


def test_the_demo_model_knows_its_special_tokens(smollm2):
    tokenizer = smollm2.tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\nHi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"


# The longest tokens possible within what the pre-tokenizer leaves together show where it splits.
WORDS = ("12345", "45", "Ġ12", "Hello", "'LL", "!!\u010a", "ĠĠĠ", "Ġworld")


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "Hello12345", ["Hello", "12345"]),
        ("default", "Hello12345", ["Hello", "12345"]),
        ("smollm", "Hello12345 12", ["Hello", *"12345", " ", *"12"]),
        ("llama-bpe", "Hello12345 12", ["Hello", "123", "45", " ", "12"]),
        ("llama3", "12345", ["123", "45"]),
        ("qwen2", "Hello12345 12", ["Hello", *"12345", " ", *"12"]),
        ("gpt-2", "we'LL!!\n", ["w", "e", "'", "L", "L", "!!", "\n"]),
        ("smollm", "we'LL!!\n", ["w", "e", "'", "L", "L", "!!", "\n"]),
        ("llama-bpe", "we'LL!!\n", ["w", "e", "'LL", "!!\n"]),
        ("qwen2", "we'LL!!\n", ["w", "e", "'LL", "!!\n"]),
        ("gpt-2", "    world", ["   ", " world"]),
        ("llama-bpe", "    world", ["   ", " world"]),
        ("qwen2", "cafe\u0301", ["c", "a", "f", "\ufffd", "\ufffd"]),
        ("gpt-2", "e\u0301", ["e", "\ufffd", "\ufffd"]),
    ],
)
def test_the_pre_tokenizer_that_the_file_names_decides_where_text_is_split(pre, text, expected):
    tokenizer = Tokenizer.from_gguf(metadata(*WORDS, pre=pre, add_bos_token=False))
    assert pieces(tokenizer, text) == expected


def test_a_word_of_the_vocabulary_is_one_token_for_llama_even_where_merges_do_not_lead_there():
    tokens = [*BYTES, "abc"]
    values = {"tokens": tokens, "merges": [], "token_type": None, "bos_token_id": None}
    for pre, expected in (("llama-bpe", ["abc"]), ("gpt-2", ["a", "b", "c"])):
        changes = {**values, "pre": pre, "eos_token_id": None}
        assert pieces(Tokenizer.from_gguf(metadata(**changes)), "abc") == expected


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, "a"),
        ("llama-bpe", {}, "<s>a"),
        ("gpt-2", {"add_bos_token": True}, "<s>a"),
        ("llama-bpe", {"add_bos_token": False}, "a"),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "<s>a</s>"),
    ],
)
def test_the_file_says_whether_a_text_begins_and_ends_with_special_tokens(pre, flags, expected):
    tokenizer = Tokenizer.from_gguf(metadata(pre=pre, **flags))
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [BYTES.index("a")]


def test_control_tokens_are_skipped_and_user_defined_ones_are_not():
    tokenizer = Tokenizer.from_gguf(metadata())
    ids = tokenizer.encode("a<s><tool></s>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.special_ids == {tokenizer.bos_token_id, tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"model='llama' is not supported, expected 'gpt2'.*tokenizer.json"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "tekken"}, r"pre='tekken' is not supported, expected one of gpt-2, .*smollm"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is None"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "2 tokens, 1 of them distinct"),
        ({"token_type": [1]}, "1 token types"),
        ({"merges": ["a zz"]}, "merges do not fit"),
        ({"merges": ["abc"]}, "merges do not fit"),
        ({"merges": ["a b c"]}, "merges do not fit"),
        ({"merges": [3]}, "merges do not fit"),
        ({"tokens": [1, 2], "token_type": [1, 1], "merges": []}, "merges do not fit the tokens"),
        ({"bos_token_id": 10**6}, "bos_token_id=1000000, but there are 259 tokens"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos=True.*bos_token_id=None"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
    ],
)
def test_a_tokenizer_that_is_broken_or_unknown_is_refused_by_name(changes, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(metadata(**changes))


def save_directory(directory, config: object = None):
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_a_directory_gives_its_tokenizer_and_special_tokens(tmp_path, eos):
    config = {"bos_token": "<s>", "eos_token": eos}
    tokenizer = Tokenizer.from_directory(save_directory(tmp_path, config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.encode("a") == [256, BYTES.index("a")]
    assert tokenizer.encode("a", add_special_tokens=False) == [BYTES.index("a")]


def test_prompts_are_never_cut_or_padded_whatever_the_file_says(tmp_path):
    tokenizer = Tokenizer.from_directory(save_directory(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert len(tokenizer.encode("a" * 100)) == 101
    assert len(tokenizer.encode("a")) == 2


def test_a_directory_without_a_tokenizer_says_how_to_make_one(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer.json; make one with transformers"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "{nope", '{"model": 3}'])
def test_a_broken_tokenizer_file_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer.json: "):
        Tokenizer.from_directory(tmp_path)


def test_text_that_is_no_unicode_is_a_value_error():
    with pytest.raises(ValueError, match="surrogates"):
        Tokenizer.from_gguf(metadata()).encode("\ud800")


BYTE_TOKENIZER = Tokenizer.from_gguf(metadata())
# The byte-level alphabet: printable bytes stand for themselves, the others follow from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
CHARS = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}


def byte_ids(data: bytes) -> list[int]:
    """One token per byte."""
    return [BYTES.index(CHARS[b]) for b in data]


def test_a_character_in_several_tokens_comes_out_whole():
    stream = BYTE_TOKENIZER.detokenizer()
    assert [stream.add([i]) for i in byte_ids("a😀é".encode())] == ["a", *3 * [""], "😀", "", "é"]
    assert stream.flush() == ""


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_are_the_text_and_none_ends_in_half_a_character(text):
    stream = BYTE_TOKENIZER.detokenizer()
    given_out = [stream.add([i]) for i in byte_ids(text.encode())]
    assert "".join(given_out) + stream.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in given_out)


@settings(max_examples=500, deadline=None)
@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_any_bytes_in_any_pieces_stream_to_what_decode_makes_of_them(data, cuts):
    ids = byte_ids(data)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    stream = BYTE_TOKENIZER.detokenizer()
    text = "".join(stream.add(ids[i:j]) for i, j in itertools.pairwise(bounds))
    assert text + stream.flush() == BYTE_TOKENIZER.decode(ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.sampled_from([*byte_ids("é😀".encode()), 256, 257, 258]), max_size=60))
def test_special_tokens_between_the_bytes_of_a_character_change_nothing(ids):
    for skip in (True, False):
        stream = BYTE_TOKENIZER.detokenizer(skip_special_tokens=skip)
        text = "".join(stream.add([i]) for i in ids) + stream.flush()
        assert text == BYTE_TOKENIZER.decode(ids, skip_special_tokens=skip)


def test_the_demo_model_streams_any_ids(smollm2):
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(smollm2.tokenizer.vocab_size) for _ in range(rng.randrange(80))]
        stream = smollm2.tokenizer.detokenizer()
        text = "".join(stream.add([i]) for i in ids) + stream.flush()
        assert text == smollm2.tokenizer.decode(ids)


def test_an_endless_run_of_invalid_bytes_is_given_out_as_it_comes():
    stream = BYTE_TOKENIZER.detokenizer()
    text = "".join(stream.add([i]) for i in byte_ids(b"\xc3" * 2000))
    assert len(text) == 1999
    assert stream.flush() == "\ufffd"


def test_what_was_incomplete_at_the_end_is_flushed_and_the_stream_starts_anew():
    stream = BYTE_TOKENIZER.detokenizer()
    assert stream.add(byte_ids(b"ab\xf0\x9f")) == "ab"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.add(byte_ids(b"\x98\x80c")) + stream.flush() == "\ufffd\ufffdc"


def sentencepiece() -> Tokenizer:
    """One that writes a space before a text, which its decoder drops, and falls back to bytes."""
    letters = ["▁", "a", "b", "▁a", "▁b", "ab"]
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    vocab |= {letter: 256 + i for i, letter in enumerate(letters)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab é日😀\n"))
def test_a_sentencepiece_decoder_streams_its_spaces_and_fallback_bytes(text):
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text)
    stream = tokenizer.detokenizer()
    assert "".join(stream.add([i]) for i in ids) + stream.flush() == tokenizer.decode(ids)
    spelled = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    assert spelled.removeprefix(" ") == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab é日😀\n", max_size=12), cut=st.integers(0, 40))
@pytest.mark.parametrize("tokenizer", [sentencepiece(), BYTE_TOKENIZER], ids=["pieces", "bytes"])
def test_what_follows_a_prompt_is_what_it_adds_to_the_text(tokenizer, text, cut):
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, more = ids[:cut], ids[cut:]
    added = tokenizer.decode_after(prompt, more)
    stream = tokenizer.detokenizer(prompt)
    assert "".join(stream.add([i]) for i in more) + stream.flush() == added
    whole, before = tokenizer.decode(ids), tokenizer.decode(prompt)
    # A prompt may end in half a character, which is shown when it is whole.
    if more and "\ufffd" not in before:
        assert added == whole.removeprefix(before)
    elif more:
        assert whole.endswith(added) and "\ufffd" not in added
    else:
        assert added == ""


def test_a_space_after_a_prompt_is_kept_and_one_that_begins_a_text_is_not():
    tokenizer = sentencepiece()
    [a] = tokenizer.encode("a")
    assert tokenizer.decode([a]) == tokenizer.decode_after([], [a]) == "a"
    assert tokenizer.decode_after([a], [a]) == " a"
    assert BYTE_TOKENIZER.decode_after(byte_ids(b"ok\xf0\x9f"), byte_ids(b"\x98\x80!")) == "😀!"
