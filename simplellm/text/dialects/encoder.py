"""A tokenizer.json of other families than gpt-oss, by the library `tokenizers`."""

import json
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simplellm.base.config import (
    MAX_SIZE,
    about,
    expect,
    expect_type,
    one_of,
    read_json,
)
from simplellm.text.tokenizer import Tokenizer, TokenizerError, printed_bytes

SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
STAND_INS = 0xD800  # surrogates: halves of characters, which no text holds
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of byte fallback
HTML = re.compile(
    "</?(a|b|blockquote|br|caption|code|em|h[1-6]|i|img|li|ol|p|pre|span|strong|sub"
    "|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)


class Encoder:
    """Text to token ids, as a parsed tokenizer.json says.

    The library gets the file without its control tokens, which it then cannot find in
    any text. They are all added tokens but those of `is_text`: also those that are not
    called special, as Qwen's `<think>`. A model of fewer ``rows`` lacks the last ones,
    as the smallest Gemma 3 does those of images.
    """

    def __init__(self, config: Mapping[str, Any], rows: int = MAX_SIZE) -> None:
        from tokenizers import Tokenizer as LibraryTokenizer

        model = part("", config, "model", Mapping)
        old = "BPE" if "merges" in model else None  # GPT-2's file says no type
        one_of("model.type", model.get("type", old), ("BPE",))
        vocab: dict[str, int] = {**part("model.", model, "vocab", Mapping)}
        # Nothing is unknown where there are all bytes.
        plain = {**config, "added_tokens": [], "post_processor": None}
        plain |= {"truncation": None, "padding": None}
        plain["model"] = {**model, "vocab": vocab, "unk_token": None}
        self.special: dict[str, int] = {}
        patterns = []
        for token in part("", config, "added_tokens", list):
            expect_type("an entry of added_tokens", token, Mapping, "an object")
            name, id = token.get("content"), token.get("id")
            ok = isinstance(name, str) and name
            expect(ok, "a name in added_tokens", name, "text")
            vocab.pop(name, None)
            if not token.get("special") and is_text(name):
                plain["added_tokens"].append(token)
                vocab[name] = id
                continue
            if isinstance(id, int) and id >= rows:
                continue
            self.special[name] = id
            before = r"\s*" if token.get("lstrip") else ""
            behind = r"\s*" if token.get("rstrip") else ""
            if is_sign(name[0]) and is_sign(name[-1]):
                patterns.append((name, before + re.escape(name) + behind))
        ids = [*vocab.values(), *self.special.values()]
        odd = [id for id in ids if type(id) is not int or not 0 <= id <= MAX_SIZE]
        expect(not odd, "a token's id", odd and odd[0], f"0 to {MAX_SIZE}")
        twice = len(ids) - len({*ids})
        expect(not twice, "the number of ids that two tokens have", twice, "0")
        self.begin = first_ids(config)  # in front of a text that is no chat
        known = {*self.begin} <= {*self.special.values()}
        expect(known, "post_processor", self.begin, "ids of control tokens")
        texts = {token["content"] for token in plain["added_tokens"]}
        self.tokens = bytes_of(vocab, texts, json.dumps(config.get("decoder")))
        self._first = LibraryTokenizer.from_str(json.dumps(plain))
        # Some put a space in front of a text, but not behind its control tokens.
        later = json.dumps(plain.get("pre_tokenizer"))
        later = later.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        plain["pre_tokenizer"] = json.loads(later)
        same = plain["pre_tokenizer"] == config.get("pre_tokenizer")
        later = json.dumps(plain)
        self._later = self._first if same else LibraryTokenizer.from_str(later)
        patterns.sort(key=lambda pair: -len(pair[0]))  # the longest one counts
        self._names = re.compile("|".join(p for _, p in patterns) or r"(?!)")
        edges = sorted({char for name, _ in patterns for char in name[0] + name[-1]})
        expect(len(edges) < 2048, "the control tokens' edges", len(edges), "fewer")
        self.hidden = {ord(c): STAND_INS + place for place, c in enumerate(edges)}
        self._shown = {stand_in: char for char, stand_in in self.hidden.items()}

    def __call__(self, text: str, special: bool) -> list[int]:
        """The ids of ``text``, for `Tokenizer`."""
        return self.mixed(text) if special else self._plain(text, 0)

    def mixed(self, text: str) -> list[int]:
        """The ids of ``text``, in which names of control tokens are those tokens.

        A part that came through ``hidden`` is text and nothing else: for in it other
        characters stand for those that a control token's name begins and ends with.
        """
        ids, place = [], 0
        for match in self._names.finditer(text):
            ids += self._plain(text[place : match.start()], place)
            ids.append(self.special[match[0].strip()])
            place = match.end()
        return ids + self._plain(text[place:], place)

    def _plain(self, text: str, place: int) -> list[int]:
        """The ids of ``text``, which has no control tokens, at ``place`` in another."""
        library = self._later if place else self._first
        shown = text.translate(self._shown)
        ids: list[int] = library.encode(shown, add_special_tokens=False).ids
        return ids


@contextmanager
def guarded(kind: type[ValueError], place: object) -> Iterator[None]:
    """Turn whatever goes wrong with a stranger's file or program into a ``kind``."""
    try:
        yield
    except Exception as error:
        named = "" if type(error) in (TypeError, ValueError) else type(error).__name__
        wrong = kind(": ".join(filter(None, [str(place), named, str(error)])))
        raise about(wrong, "messages") from None


def part(where: str, config: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of a parsed file. Raises TypeError unless it is of a ``kind``."""
    wanted = "a list" if kind is list else "an object"
    expect_type(where + name, config.get(name), kind, wanted)
    return config[name]


def is_sign(char: str) -> bool:
    """Whether a control token's name may begin with ``char``, to be found in text."""
    return not (char.isalnum() or char.isspace())


def is_text(name: str) -> bool:
    """Whether an added token that isn't called special is none: in Gemma's files these
    are runs of white space and HTML, in others new words.
    """
    plain = name.strip(" \t\r\n" + SPACE)
    tag = plain and is_sign(name[0]) and is_sign(name[-1])
    return not tag or HTML.fullmatch(name) is not None


def needs(library: str) -> None:
    """Raise ValueError if a ``library`` of the extra "families" is not installed."""
    wanted = "it installed, as by pip install 'simplellm[families]'"
    expect(find_spec(library), f"the library {library}", "missing", wanted)


def bytes_of(
    vocab: Mapping[str, int], texts: Container[str], decoder: str
) -> dict[int, bytes]:
    """The bytes of each token of a vocabulary, by its id.

    ``texts`` are tokens that stand for themselves. Raises ValueError if all can't spell
    every text.
    """
    level, byte_of = '"ByteLevel"' in decoder, printed_bytes()
    known = level or '"ByteFallback"' in decoder
    expect(known, "decoder", decoder, "one with ByteLevel or ByteFallback")
    spelled = {}
    for token, id in vocab.items():
        if level and token not in texts:
            spelled[id] = bytes(byte_of.get(char, 256) for char in token)
        elif not level and (byte := BYTE.fullmatch(token)):
            spelled[id] = bytes.fromhex(byte[1])
        else:
            spelled[id] = (token if level else token.replace(SPACE, " ")).encode()
    missing = {bytes([byte]) for byte in range(256)} - {*spelled.values()}
    expect(not missing, "model.vocab", missing, "a token for each byte")
    return spelled


def read_tokenizer(path: Path, rows: int = MAX_SIZE) -> tuple[Tokenizer, Encoder]:
    """The tokenizer of a tokenizer.json, and what encodes for it.

    Its bytes are exact. So what SentencePiece puts in front of a text, a space, is
    decoded as one, though the library leaves it out. Raises TokenizerError.
    """
    with guarded(TokenizerError, path):
        encoder = Encoder(read_json(path), rows)
        return Tokenizer(encoder.tokens, encoder.special, encoder), encoder


def first_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that a tokenizer.json puts in front of every text."""
    post = config.get("post_processor") or {}
    ids: list[int] = []
    for part in post.get("processors", [post]):
        for piece in part.get("single", ()) if "special_tokens" in part else ():
            if "SpecialToken" not in piece:
                break
            name = piece["SpecialToken"]["id"]
            ids += part["special_tokens"][name]["ids"]
    return tuple(ids)
