"""Convert text to token ids and back."""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiktoken

from simplellm.base.config import expect_type, read_json, reraise_as


class TokenizerError(ValueError):
    """A tokenizer.json that cannot be used, or a text that cannot be encoded."""


class Tokenizer:
    """`encode` text to token ids and `decode` them.

    Families of tokenizers differ in three values. ``tokens`` holds the bytes of each
    ordinary token by its id; ``special`` the ids of the control tokens, which ordinary
    text never encodes to, by their names; ``encoder`` takes a text and whether names of
    control tokens in it become those tokens, and returns ids. An id that is neither
    ordinary nor special is reserved: a model may have more ids than its tokenizer.
    """

    def __init__(
        self,
        tokens: Mapping[int, bytes],
        special: Mapping[str, int],
        encoder: Callable[[str, bool], list[int]],
    ) -> None:
        self.tokens = dict(tokens)
        self.special = dict(special)
        self.vocab_size = 1 + max(*self.tokens, *self.special.values())
        self._names = {id: name.encode() for name, id in special.items()}
        self._encoder = encoder

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The token ids of ``text``.

        With ``special`` the names of control tokens in it become those tokens;
        without, `<|end|>` is seven characters like any others. Raises TypeError for
        what is not a str, and TokenizerError for a str with a surrogate (U+D800 to
        U+DFFF): it is half a character, which UTF-8 cannot hold. All else is encoded.
        """
        expect_type("text", text, str, "str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"lone surrogate U+{ord(text[error.start]):04X} at position "
                f"{error.start}; expected valid Unicode text"
            ) from None
        return self._encoder(text, special)

    def token_bytes(self, id: int, *, skip_special: bool = False) -> bytes:
        """The bytes that token ``id`` stands for; a control token's are its name.

        With ``skip_special`` control tokens and reserved ids stand for no bytes.
        """
        if (token := self.tokens.get(id)) is not None:
            return token
        if skip_special:
            return b""
        return self._names.get(id) or f"<|reserved_{id}|>".encode()

    def is_special(self, id: int) -> bool:
        """Whether ``id`` is a control token or reserved, and so never part of text."""
        return id not in self.tokens

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        parts = (self.token_bytes(id, skip_special=skip_special) for id in ids)
        return b"".join(parts).decode(errors="replace")

    @classmethod
    def from_ranks(
        cls, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]
    ) -> "Tokenizer":
        """Byte-level BPE, by tiktoken.

        ``ranks`` holds the ids of the ordinary tokens: of two possible merges the one
        with the lower id goes first. ``pattern`` is the regular expression that cuts a
        text into the pieces within which tokens are merged. Raises TokenizerError for a
        pattern that is none, and for ids that repeat or are out of range, on which
        tiktoken would crash.
        """
        ids = [*ranks.values(), *special.values()]
        if min(ids) < 0 or max(ids) >= 2**32 or len({*ids}) < len(ids):
            raise TokenizerError(
                "token ids repeat or are out of range; expected each token to have its "
                "own, from 0 to 2^32 - 1"
            )
        try:
            bpe = tiktoken.Encoding(
                "simplellm",
                pat_str=pattern,
                mergeable_ranks=dict(ranks),
                special_tokens=dict(special),
            )
        except ValueError as error:
            raise TokenizerError(
                f"{pattern!r} is not a regular expression: {error}"
            ) from None

        def encode(text: str, special: bool) -> list[int]:
            allowed = bpe.special_tokens_set if special else set()
            cuts = (run.end() for run in WHITESPACE_RUN.finditer(text))
            ids: list[int] = []
            for start, end in pairwise([0, *cuts, len(text)]):
                ids += bpe.encode(
                    text[start:end], allowed_special=allowed, disallowed_special=()
                )
            return ids

        return cls({id: token for token, id in ranks.items()}, special, encode)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer of a tokenizer.json like gpt-oss's: byte-level BPE, one Split.

        Ids are those of `tokenizers` if every split of a token into two tokens that
        merge is listed, as there. Raises TokenizerError for anything else.
        """
        try:
            return cls.from_ranks(*read_bpe(config))
        except TokenizerError:
            raise
        except Exception as error:  # it can go wrong in more ways than one can list
            wrong = f"{type(error).__name__}: {error}"
        raise TokenizerError(f"not a tokenizer.json like that of gpt-oss ({wrong})")

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """`from_json` of a file, which errors name."""
        with reraise_as(TokenizerError, path):
            return cls.from_json(read_json(path))


# tiktoken's regex engine overflows its stack on a run of about a million whitespace
# characters; a text is cut behind each run as long as this.
WHITESPACE_RUN = re.compile(r"\s{100000}")

# What gpt-oss's tokenizer.json says of model, normalizer and the pre-tokenizer's steps.
KIND = ("BPE", None, "Sequence", "Split", "Isolated", False, "ByteLevel", False, False)


def read_bpe(config: Any) -> tuple[dict[bytes, int], str, dict[str, int]]:
    """Ranks, pattern and control tokens of a parsed tokenizer.json for `from_ranks`."""
    model, cut = config["model"], config["pre_tokenizer"]
    split, level = cut["pretokenizers"]
    kind = [model["type"], config.get("normalizer"), cut["type"]]
    kind += [split["type"], split["behavior"], split["invert"]]
    kind += [level["type"], level["add_prefix_space"], level["use_regex"]]
    if tuple(kind) != KIND:
        raise TokenizerError(f"it has {kind}; expected {[*KIND]} as in gpt-oss")
    special = {token["content"]: token["id"] for token in config["added_tokens"]}
    vocab = {token: id for token, id in model["vocab"].items() if token not in special}
    byte_of = printed_bytes()
    if odd := {*"".join(vocab)} - {*byte_of} or {*byte_of} - {*vocab}:
        raise TokenizerError(
            f"the vocabulary is not byte-level: {min(odd)!r} stands for no byte, or "
            "for one that is no token; expected all 256 bytes and nothing else"
        )
    # tiktoken merges by id: with merges in another order it would give other ids.
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    order = [vocab.get(left + right, -1) for left, right in pairs]
    if order != sorted(order):
        raise TokenizerError("the merges do not stand in the order of their ids")
    ranks = {bytes(byte_of[char] for char in token): vocab[token] for token in vocab}
    return ranks, split["pattern"]["Regex"], special


def printed_bytes() -> dict[str, int]:
    """The character that stands for each byte in a tokenizer.json.

    Printable Latin-1 characters stand for themselves; the other 68 bytes are numbered
    from U+0100 on, so that no token holds a space (GPT-2's `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable}
    return bytes_of | {chr(0x100 + number): byte for number, byte in enumerate(others)}
