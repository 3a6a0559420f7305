"""Text to token ids and back: byte-level BPE from a checkpoint's tokenizer.json."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tiktoken

# The pattern of GPT-2, which `{"type": "ByteLevel", "use_regex": true}` stands for.
GPT2_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
# tiktoken's regex engine overflows its stack on a run of about a million whitespace
# characters; longer runs than this are encoded in blocks.
WHITESPACE_BLOCK = re.compile(r"\s{100000}")


class TokenizerError(ValueError):
    """A tokenizer.json that cannot be used, or a text that cannot be encoded."""


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte in tokenizer.json, and that byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes are numbered
    from U+0100 on, so that no token contains a space or a control character
    (GPT-2's `bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {
        chr(0x100 + i): b for i, b in enumerate(others)
    }


def split_pattern(pre_tokenizer: Any) -> str:
    """The regular expression by which a pre-tokenizer of tokenizer.json cuts text.

    Understood are a ByteLevel step with its built-in pattern, and a Sequence of one
    Split by regex and a ByteLevel step without. Raises TokenizerError for others.
    """
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str() as pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    raise TokenizerError(
        f"pre_tokenizer {json.dumps(pre_tokenizer)[:200]} is not supported; "
        "expected one Split by an isolating Regex followed by ByteLevel"
    )


def bpe_ranks(vocab: Mapping[str, int], merges: Iterable[Any]) -> dict[bytes, int]:
    """The bytes of each token and its id, which is also its merge's rank.

    ``merges`` are pairs, or strings with a space between, in order of priority.
    Raises TokenizerError if the ids do not follow that order or a byte is missing.
    """
    byte_of = byte_characters()
    try:
        ranks = {bytes(byte_of[c] for c in token): id for token, id in vocab.items()}
    except KeyError as error:
        raise TokenizerError(
            f"the vocabulary has a token with the character {error.args[0]!r}, which "
            "stands for no byte; expected a byte-level vocabulary"
        ) from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(
            f"the vocabulary has no token for byte {missing[0]:#04x}; "
            "expected all 256 bytes"
        )
    last = -1
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merged = vocab.get(left + right, -1)
        if merged < last:
            raise TokenizerError(
                f"merge {left!r} + {right!r} gives id {merged} after id {last}; "
                "expected merges in the order of their ids"
            )
        last = merged
    return ranks


class Tokenizer:
    """Byte-level BPE: `encode` text to token ids and `decode` them.

    ``ranks`` holds the bytes of each ordinary token and its id; of two possible merges
    the one with the lower id goes first. ``pattern`` is the regular expression that
    cuts a text into the pieces within which tokens are merged. ``special`` holds the
    control tokens, which ordinary text never encodes to. Ids that are neither are
    reserved: a model's vocabulary may be larger than its tokenizer.

    Raises TokenizerError for a pattern that is not a regular expression, and for ids
    that repeat or are out of range.
    """

    def __init__(
        self, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]
    ) -> None:
        self.special = dict(special)
        ids = [*ranks.values(), *special.values()]
        self.vocab_size = 1 + max(ids)
        if min(ids) < 0 or self.vocab_size > 2**32 or len({*ids}) < len(ids):
            raise TokenizerError(
                "token ids repeat or are out of range; expected each token to have its "
                "own, from 0 to 2^32 - 1"
            )
        self._bytes = {id: token for token, id in ranks.items()}
        self._control = {id: name.encode() for name, id in special.items()}
        try:
            self._encoding = tiktoken.Encoding(
                "simplellm",
                pat_str=pattern,
                mergeable_ranks=dict(ranks),
                special_tokens=self.special,
            )
        except ValueError as error:
            raise TokenizerError(
                f"{pattern!r} is not a regular expression: {error}"
            ) from None

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Read a byte-level BPE tokenizer.json, as Hugging Face `tokenizers` writes it.

        Ids are those of `tokenizers` if every split of a token into two tokens that
        merge is listed, as in gpt-oss. Raises TokenizerError for anything else.
        """
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise TokenizerError(
                f"{path}: {error.strerror}; expected a tokenizer.json"
            ) from None
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{path}: not JSON: {error}") from None
        try:
            if (kind := config["model"]["type"]) != "BPE":
                raise TokenizerError(f"model type {kind!r}; expected 'BPE'")
            if (normalizer := config.get("normalizer")) is not None:
                raise TokenizerError(f"normalizer {normalizer}; expected none")
            special = {
                token["content"]: token["id"] for token in config["added_tokens"]
            }
            vocab = {
                token: id
                for token, id in config["model"]["vocab"].items()
                if token not in special
            }
            ranks = bpe_ranks(vocab, config["model"]["merges"])
            return cls(ranks, split_pattern(config.get("pre_tokenizer")), special)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{path}: not a tokenizer.json ({type(error).__name__}: {error}); "
                "expected `added_tokens` and `model` with type, vocab and merges"
            ) from None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The token ids of ``text``.

        With ``special`` the names of control tokens in it become those tokens;
        without, `<|end|>` is seven characters like any others. Raises TypeError for
        what is not a str, TokenizerError for lone surrogates and NUL.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is {type(text).__name__}; expected str")
        check_text(text)
        allowed = set(self.special) if special else set()
        ids: list[int] = []
        for block in whitespace_blocks(text):
            ids += self._encoding.encode(
                block, allowed_special=allowed, disallowed_special=()
            )
        return ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes that token ``id`` stands for; a control token's are its name."""
        if (token := self._bytes.get(id)) is not None:
            return token
        return self._control.get(id) or f"<|reserved_{id}|>".encode()

    def is_special(self, id: int) -> bool:
        """Whether ``id`` is a control token or reserved, and so never part of text."""
        return id not in self._bytes

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        kept = (id for id in ids if not (skip_special and self.is_special(id)))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")


def check_text(text: str) -> None:
    """Raise TokenizerError if ``text`` holds what no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"lone surrogate U+{ord(text[error.start]):04X} at position {error.start}; "
            "expected valid Unicode text"
        ) from None
    if (position := text.find("\0")) >= 0:
        raise TokenizerError(
            f"NUL character at position {position}; expected text without U+0000"
        )


def whitespace_blocks(text: str) -> Iterator[str]:
    """``text``, cut behind each 100,000 consecutive whitespace characters."""
    start = 0
    for block in WHITESPACE_BLOCK.finditer(text):
        yield text[start : block.end()]
        start = block.end()
    yield text[start:]


class StreamDecoder:
    """Decodes one token at a time and only ever gives out complete characters.

    A character's UTF-8 bytes may be spread over several tokens: `push` returns "" until
    the last of them is there. Bytes that can no longer become a character turn into
    U+FFFD. What `push` and `flush` return adds up to `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that token ``id`` completes."""
        if self._skip_special and self._tokenizer.is_special(id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """At the end: U+FFFD for a character whose last bytes never came, or ""."""
        return self._utf8.decode(b"", final=True)
