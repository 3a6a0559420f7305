"""A tokenizer.json of other families than gpt-oss, by the library `tokenizers`."""

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simplellm.config import expect, one_of, raising, read_json
from simplellm.tokenizer import Tokenizer, TokenizerError, printed_bytes

SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
STAND_INS = 0xD800  # surrogates: halves of characters, which no text holds
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of byte fallback


class Encoder:
    """Text to token ids, as a parsed tokenizer.json says.

    The library gets the file without its control tokens, which it then cannot find in
    any text. They are all added tokens but white space, which Gemma adds for speed:
    also those that are not called special, as Qwen's `<think>`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        model = config["model"]
        old = "BPE" if "merges" in model else None  # GPT-2's file says no type
        one_of("model.type", model.get("type", old), ("BPE",))
        vocab: dict[str, int] = {**model["vocab"]}
        # Nothing is unknown where there are all bytes.
        plain = {**config, "added_tokens": [], "post_processor": None}
        plain |= {"truncation": None, "padding": None}
        plain["model"] = {**model, "vocab": vocab, "unk_token": None}
        self.special: dict[str, int] = {}
        patterns = []
        for token in config["added_tokens"]:
            name, id = token["content"], token["id"]
            if not token["special"] and not name.strip(" \t\r\n" + SPACE):
                plain["added_tokens"].append(token)
                vocab[name] = id
                continue
            self.special[name] = id
            vocab.pop(name, None)
            before = r"\s*" if token.get("lstrip") else ""
            behind = r"\s*" if token.get("rstrip") else ""
            if is_sign(name[0]) and is_sign(name[-1]):
                patterns.append((name, before + re.escape(name) + behind))
        self.begin = first_ids(config)  # in front of a text that is no chat
        self.tokens = bytes_of(vocab, json.dumps(plain["decoder"]))
        ids = [*vocab.values(), *self.special.values()]
        ok = len({*ids}) == len(ids) and min(ids) >= 0 and max(ids) < 2**31
        expect(ok, "a token's id", "used twice", "an id of its own, 0 to 2^31 - 1")
        self._first = library_tokenizer(plain)
        # Some put a space in front of a text, but not behind its control tokens.
        later = json.dumps(plain["pre_tokenizer"])
        later = later.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        plain["pre_tokenizer"], same = json.loads(later), plain["pre_tokenizer"]
        same = same == plain["pre_tokenizer"]
        self._later = self._first if same else library_tokenizer(plain)
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


def is_sign(char: str) -> bool:
    """Whether a control token's name may begin with ``char``, to be found in text."""
    return not (char.isalnum() or char.isspace())


def library_tokenizer(config: Mapping[str, Any]) -> Any:
    """The library's tokenizer of a tokenizer.json. Raises what the library does."""
    needs("tokenizers")
    from tokenizers import Tokenizer as LibraryTokenizer

    return LibraryTokenizer.from_str(json.dumps(config))


def needs(library: str) -> None:
    """Raise ValueError if a ``library`` of the extra "families" is not installed."""
    wanted = "it installed, as by pip install 'simplellm[families]'"
    expect(find_spec(library), f"the library {library}", "missing", wanted)


def bytes_of(vocab: Mapping[str, int], decoder: str) -> dict[int, bytes]:
    """The bytes of each token of a vocabulary, by its id.

    Raises ValueError if they can't spell every text.
    """
    if '"ByteLevel"' in decoder:
        byte_of = printed_bytes()
        spelled = {
            id: bytes(byte_of.get(char, 256) for char in token)
            for token, id in vocab.items()
            if not token.isspace()
        } | {id: token.encode() for token, id in vocab.items() if token.isspace()}
    else:
        known = '"ByteFallback"' in decoder
        expect(known, "decoder", decoder, "one with ByteLevel or ByteFallback")
        spelled = {}
        for token, id in vocab.items():
            byte = BYTE.fullmatch(token)
            text = token.replace(SPACE, " ").encode()
            spelled[id] = bytes.fromhex(byte[1]) if byte else text
    missing = {bytes([byte]) for byte in range(256)} - {*spelled.values()}
    expect(not missing, "model.vocab", missing, "a token for each byte")
    return spelled


def read_tokenizer(path: Path) -> tuple[Tokenizer, Encoder]:
    """The tokenizer of a tokenizer.json, and what encodes for it.

    Its bytes are exact. So what SentencePiece puts in front of a text, a space, is
    decoded as one, though the library leaves it out. Raises TokenizerError.
    """
    with raising(TokenizerError, path):
        config = read_json(path)
        encoder, wrong = None, ""
        try:
            encoder = Encoder(config)
        except (TypeError, ValueError):
            raise
        except Exception as error:  # it can go wrong in more ways than one can list
            wrong = f"{type(error).__name__}: {error}"
        expect(encoder, "it", wrong, "a tokenizer.json of the library tokenizers")
    assert encoder is not None
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
