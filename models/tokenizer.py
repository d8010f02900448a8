"""Text to token ids and back, through the `tokenizers` library.

A tokenizer comes from the files of a Hugging Face directory or is rebuilt from the metadata of a
GGUF file. `Detokenizer` turns a stream of ids into a stream of text.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .safetensors_io import read_json_object
from .token_bytes import TokenBytes

if TYPE_CHECKING:  # an optional dependency: imported where it is used
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"

# Token types of GGUF; other types are part of the vocabulary like normal tokens.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_REPLACEMENT = "\ufffd"
# A character takes at most four bytes, and a token at least one. So many tokens without a whole
# character at their end are invalid UTF-8, of which only the last bit can still change.
_MAX_HELD = 8
# Ids at the end of a prompt that a stream of what follows looks at, special ones among them.
NUM_CONTEXT_IDS = 2 * _MAX_HELD

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class TokenizerError(ValueError):
    """A tokenizer that is missing, broken or of an unsupported kind."""


@dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    """What the name in `tokenizer.ggml.pre` stands for."""

    # Regexes whose matches become words of their own, one after the other; the byte level then
    # splits further as GPT-2 does only where `gpt2_regex` is set.
    splits: tuple[str, ...] = ()
    gpt2_regex: bool = True
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say


_PLAIN = _PreTokenizer()
_LLAMA_BPE = _PreTokenizer(splits=(_LLAMA3,), gpt2_regex=False, ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PLAIN,
    "default": _PLAIN,
    "smollm": _PreTokenizer(splits=(r"\p{N}",)),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": _PreTokenizer(splits=(_QWEN2,), gpt2_regex=False, nfc=True),
}


class Tokenizer:
    """Encodes text to token ids and decodes them.

    Attributes:
        bos_token_id, eos_token_id: the tokens that begin and end a text, or None.
        special_ids: ids of control tokens, which `decode` leaves out by default.
        token_bytes: from an id to the bytes that it stands for, half a character too.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library.

        `add_bos` and `add_eos` say what `encode` adds beside what the backend adds itself.

        Raises:
            TokenizerError: `add_bos` or `add_eos` without the token to add.
        """
        if (add_bos and bos_token_id is None) or (add_eos and eos_token_id is None):
            raise TokenizerError(
                f"{add_bos=} and {add_eos=} need their tokens, got {bos_token_id=}, {eos_token_id=}"
            )
        # Files may carry the settings of the training run; a prompt is never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self._prefix = [bos_token_id] if add_bos and bos_token_id is not None else []
        self._suffix = [eos_token_id] if add_eos and eos_token_id is not None else []
        self.special_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.token_bytes = TokenBytes(backend)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read `tokenizer.json`, and `tokenizer_config.json` for the special tokens.

        Raises:
            TokenizerError: `tokenizer.json` is missing or broken.
            WeightsError: `tokenizer_config.json` is broken.
        """
        import tokenizers

        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(
                f"{directory}: has no {TOKENIZER_FILE}; make one with transformers: "
                "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path}: {error}") from error
        config_path = directory / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}

        def token_id(key: str) -> int | None:
            token = config.get(key)
            if isinstance(token, Mapping):
                token = token.get("content")
            return backend.token_to_id(token) if isinstance(token, str) else None

        return cls(backend, bos_token_id=token_id("bos_token"), eos_token_id=token_id("eos_token"))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer that a GGUF file describes under `tokenizer.ggml`.

        Raises:
            TokenizerError: it is not a byte-level BPE tokenizer of a known kind, or is broken.
        """

        def get(key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
            value = metadata.get(f"tokenizer.ggml.{key}", default)
            if not isinstance(value, kind):
                raise TokenizerError(f"tokenizer.ggml.{key} is {value!r:.80}, expected {kind}")
            return value

        if (model := get("model", str)) != "gpt2":
            raise TokenizerError(
                f"tokenizer.ggml.model={model!r} is not supported, expected 'gpt2'; use the "
                f"Hugging Face directory of the model, with its {TOKENIZER_FILE}"
            )
        pre = _PRE_TOKENIZERS.get(get("pre", str))
        if pre is None:
            raise TokenizerError(
                f"tokenizer.ggml.pre={get('pre', str)!r} is not supported, expected one of "
                f"{', '.join(_PRE_TOKENIZERS)}"
            )
        tokens = get("tokens", list)
        types = get("token_type", list, [_NORMAL] * len(tokens))
        backend = _build_bpe(tokens, types, get("merges", list), pre)
        ids: dict[str, int | None] = {}
        for name in ("bos", "eos"):
            ids[name] = value = get(f"{name}_token_id", (int, type(None)))
            if value is not None and not 0 <= value < len(tokens):
                raise TokenizerError(
                    f"tokenizer.ggml.{name}_token_id={value}, but there are {len(tokens)} tokens"
                )
        return cls(
            backend,
            bos_token_id=ids["bos"],
            eos_token_id=ids["eos"],
            add_bos=get("add_bos_token", bool, pre.add_bos and ids["bos"] is not None),
            add_eos=get("add_eos_token", bool, False),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; control tokens written in the text become those tokens.

        A rendered chat template needs `add_special_tokens=False`: it writes its own.

        Raises:
            ValueError: the text cannot be UTF-8 (a lone surrogate).
        """
        text.encode("utf-8")
        # A batch of one, because `encode` keeps the interpreter locked until it is done.
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """What token ids add to the text of those before them."""
        stream = self.detokenizer(before)
        return stream.add(ids) + stream.flush()

    def token(self, token_id: int) -> str | None:
        """The entry of the vocabulary with this id, as the vocabulary writes it."""
        return self._backend.id_to_token(token_id)

    def to_json(self) -> str:
        """The tokenizer in the format of `tokenizer.json`, which other libraries read."""
        return self._backend.to_str()

    def detokenizer(
        self, after: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A new stream from ids to text, which goes on after the text of other ids."""
        return Detokenizer(self, after, skip_special_tokens=skip_special_tokens)


def _build_bpe(
    tokens: list[Any], types: list[Any], merges: list[Any], pre: _PreTokenizer
) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise TokenizerError(
            f"tokenizer.ggml has {len(tokens)} tokens, {len(vocab)} of them distinct, and "
            f"{len(types)} token types; expected three times the same"
        )
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_regex)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend


class Detokenizer:
    """Turns ids into text as they come, never giving out half of a character.

    The pieces that `add` returns and the one that `flush` returns, put together, are what
    `Tokenizer.decode` makes of all the ids; or, after other ids, what these add to their text: the
    space before a word, which SentencePiece drops at the start of a text and nowhere else, and the
    whole of a character that they end in the middle of. (`tokenizers.decoders.DecodeStream` has no
    flush, and decodes everything since the last whole character again for every id.)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        after: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        # A few ids whose text is out (decoders may look back), then those whose text is not out
        # yet, or not all of it.
        nearest = (int(i) for i in after[-NUM_CONTEXT_IDS:])
        self._ids = [i for i in nearest if i not in self._skipped][-_MAX_HELD:]
        while self._ids and _begins_inside(tokenizer.token_bytes(self._ids[0])):
            del self._ids[0]
        self._num_context = len(self._ids)
        self._num_given = len(self._decode())  # characters of the decoded `_ids` that are out
        self._has_added = False
        if num_open := self._num_open_ids():
            # Bytes beside half a character may not be shown either, before it is whole.
            shown = len(self._decode().rstrip(_REPLACEMENT))
            self._ids, rest = self._ids[:-num_open], self._ids[-num_open:]
            self._num_context = len(self._ids)
            self._num_given = max(shown, len(self._decode()))
            self._ids += rest

    def add(self, ids: Sequence[int]) -> str:
        """Take more ids; return the text that they made certain, possibly none."""
        return "".join([self._add_one(i) for i in ids if i not in self._skipped])

    def flush(self) -> str:
        """Return what was held back, an incomplete character at the end; then start anew."""
        piece = self._decode()[self._num_given :] if self._has_added else ""
        self._ids, self._num_context, self._num_given = [], 0, 0
        return piece

    def _num_open_ids(self) -> int:
        """How many ids at the end hold a character that is not whole yet."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        first = 0
        for i, token_id in enumerate(self._ids):
            if not utf8.getstate()[0]:
                first = i
            utf8.decode(self._tokenizer.token_bytes(token_id))
        return len(self._ids) - first if utf8.getstate()[0] else 0

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

    def _add_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._has_added = True
        text = self._decode()
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        invalid = held > 0 and len(self._ids) - self._num_context > _MAX_HELD
        if invalid:
            held = 1
        end = len(text) - held
        piece = text[self._num_given : end]
        if held == 0:
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._num_given = len(self._decode())
        elif invalid:
            self._ids = self._ids[-_MAX_HELD:]
            self._num_context = 0
            self._num_given = len(self._decode()) - held
        else:
            self._num_given = max(self._num_given, end)
        return piece


def _begins_inside(utf8: bytes) -> bool:
    """Whether the first byte continues a character."""
    return utf8[:1] != b"" and utf8[0] & 0xC0 == 0x80
