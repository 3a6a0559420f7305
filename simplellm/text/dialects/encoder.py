"""A tokenizer.json of other families than gpt-oss, by the library `tokenizers`."""

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simplellm.base.config import MAX_SIZE, expect, expect_type, one_of
from simplellm.text.tokenizer import Tokenizer, TokenizerError, printed_bytes

SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
STAND_INS = 0xD800  # surrogates: halves of characters, which no text holds
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of byte fallback
TAG_FORM = re.compile(r"[^\w\s].*\w.*[^\w\s]")  # may be looked for in a template's text


class Encoder:
    """Text to token ids, as a parsed tokenizer.json says.

    The library gets the file without its control tokens, which it then cannot find in
    any text. These are the added tokens that are called special, and those that stand
    in ``naming``, texts of the checkpoint: what its chat template writes, as Qwen's
    does `<think>`, and what else its settings call special. All other added tokens are
    text, as Gemma's `<html>`. A model of fewer ``rows`` lacks the last added ones, as
    the smallest Gemma 3 does those of images.

    What no token spells, a byte that a vocabulary lacks, is left out: the unknown token
    is a control token, which no text may become.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        rows: int = MAX_SIZE,
        naming: Sequence[str] = (),
    ) -> None:
        from tokenizers import Tokenizer as LibraryTokenizer

        model = field_of("", config, "model", Mapping)
        old = "BPE" if "merges" in model else None  # GPT-2's file says no type
        one_of("model.type", model.get("type", old), ("BPE", "Unigram"))
        vocab = ids_of(model)
        plain = {**config, "added_tokens": [], "post_processor": None}
        plain |= {"truncation": None, "padding": None}
        self.special: dict[str, int] = {}
        patterns = []
        for token in field_of("", config, "added_tokens", list):
            expect_type("an entry of added_tokens", token, Mapping, "an object")
            name, id = token.get("content"), token.get("id")
            ok = isinstance(name, str) and name
            expect(ok, "a name in added_tokens", name, "text")
            vocab.pop(name, None)
            if isinstance(id, int) and id >= rows:
                continue
            if not (token.get("special") or is_named(name, naming)):
                plain["added_tokens"].append(token)
                vocab[name] = id
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
        names = {token["content"] for token in config["added_tokens"]}
        plain["model"] = with_vocab(model, vocab, names - vocab.keys())
        self._unknown = plain["model"].get("unk_id")  # of a Unigram
        self.begin = first_ids(config)  # in front of a text that is no chat
        special = {*self.begin} <= {*self.special.values()}
        expect(special, "post_processor", self.begin, "ids of control tokens")
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
        self.hidden = {ord(c): STAND_INS + number for number, c in enumerate(edges)}
        self._shown = {stand_in: char for char, stand_in in self.hidden.items()}

    def __call__(self, text: str, special: bool) -> list[int]:
        """The ids of ``text``, for `Tokenizer`."""
        return self.mixed(text) if special else self._plain(text, 0)

    def mixed(self, text: str) -> list[int]:
        """The ids of ``text``, in which names of control tokens are those tokens.

        A part that came through ``hidden`` is text and nothing else: for in it other
        characters stand for those that a control token's name begins and ends with.
        """
        ids, start = [], 0
        for match in self._names.finditer(text):
            ids += self._plain(text[start : match.start()], start)
            ids.append(self.special[match[0].strip()])
            start = match.end()
        return ids + self._plain(text[start:], start)

    def _plain(self, text: str, start: int) -> list[int]:
        """The ids of ``text`` without control tokens, at ``start`` in another."""
        library = self._later if start else self._first
        shown = text.translate(self._shown)
        ids: list[int] = library.encode(shown, add_special_tokens=False).ids
        return [id for id in ids if id != self._unknown]


@contextmanager
def reraise_any_as(kind: Callable[[str], ValueError], where: object) -> Iterator[None]:
    """Turn whatever goes wrong with a stranger's file or program into a ``kind``."""
    try:
        yield
    except Exception as error:
        named = "" if type(error) in (TypeError, ValueError) else type(error).__name__
        raise kind(": ".join(filter(None, [str(where), named, str(error)]))) from None


def field_of(where: str, config: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of a parsed file. Raises TypeError unless it is of a ``kind``."""
    expected = "a list" if kind is list else "an object"
    expect_type(where + name, config.get(name), kind, expected)
    return config[name]


def is_sign(char: str) -> bool:
    """Whether a control token's name may begin with ``char``, to be found in text."""
    return not (char.isalnum() or char.isspace())


def is_named(name: str, naming: Sequence[str]) -> bool:
    """Whether an added token is a tag that stands in one of the texts ``naming`` it."""
    return TAG_FORM.fullmatch(name) is not None and any(name in text for text in naming)


def ids_of(model: Mapping[str, Any]) -> dict[str, int]:
    """The ids of a tokenizer.json's tokens, but for the unknown one of a Unigram.

    There each has a score, the logarithm of its probability, and its id is its place. A
    text becomes those of the largest sum, and what none spells its bytes, if these are
    tokens, too.
    """
    if model.get("type") != "Unigram":
        return {**field_of("model.", model, "vocab", Mapping)}
    ids: dict[str, int] = {}
    for id, entry in enumerate(field_of("model.", model, "vocab", list)):
        kinds = isinstance(entry, list) and [*map(type, entry)]
        ok = kinds in ([str, float], [str, int])
        expect(ok, "an entry of model.vocab", entry, "a token and its score")
        if entry[0] and id != model.get("unk_id"):
            ids[entry[0]] = id
    return ids


def with_vocab(
    model: Mapping[str, Any], vocab: Mapping[str, int], removed: Container[str]
) -> dict[str, Any]:
    """The model of a tokenizer.json without the tokens that were ``removed``."""
    if model.get("type") == "Unigram":
        return unigram_model(model, vocab)
    merges = merges_of(model.get("merges"), vocab, removed)
    return {**model, "vocab": vocab, "merges": merges, "unk_token": None}


def unigram_model(model: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[str, Any]:
    """The model with the tokens of ``vocab`` at their ids, and "" for all others.

    No text has that. One more id is that of what no token spells, for the library.
    """
    scores = [score for _, score in model["vocab"]]
    last, most = max(vocab.values(), default=0), len(scores) + len(vocab)
    expect(last < most, "the largest id of a token", last, f"less than {most}")
    unknown = max(len(scores), last + 1)
    scores += [min(scores)] * (unknown + 1 - len(scores))
    tokens = {id: token for token, id in vocab.items()}
    table = [[tokens.get(id, ""), score] for id, score in enumerate(scores)]
    return {**model, "vocab": table, "unk_id": unknown}


def merges_of(
    entries: Any, vocab: Mapping[str, int], removed: Container[str]
) -> list[Any]:
    """The merges of a BPE but for those of tokens that were ``removed``.

    A file without them means all that its tokens allow, in the order of their ids, as
    transformers has it.
    """
    if entries is None:
        tokens = sorted(vocab, key=vocab.__getitem__)
        cuts = (
            (token[:n], token[n:]) for token in tokens for n in range(1, len(token))
        )
        return [[left, right] for left, right in cuts if {left, right} <= vocab.keys()]
    expect_type("model.merges", entries, list, "a list")
    merges = []
    for merge in entries:
        parts = merge.split(" ") if isinstance(merge, str) else [*merge]
        if not any(token in removed for token in [*parts, "".join(parts)]):
            merges.append(parts)
    return merges


def require_library(library: str) -> None:
    """Raise ValueError if a ``library`` of the extra "families" is not installed."""
    expected = "it installed, as by pip install 'simplellm[families]'"
    expect(find_spec(library), f"the library {library}", "missing", expected)


def bytes_of(
    vocab: Mapping[str, int], texts: Container[str], decoder: str
) -> dict[int, bytes]:
    """The bytes of each token of a vocabulary, by its id.

    ``texts`` are tokens that stand for themselves, as do those with characters that
    stand for no byte.
    """
    level, byte_of = '"ByteLevel"' in decoder, printed_bytes()
    ok = level or '"ByteFallback"' in decoder or '"Metaspace"' in decoder
    expect(ok, "decoder", decoder, "one with ByteLevel, ByteFallback or Metaspace")
    spelled = {}
    for token, id in vocab.items():
        if level and token not in texts and byte_of.keys() >= {*token}:
            spelled[id] = bytes(byte_of[char] for char in token)
        elif not level and (byte := BYTE.fullmatch(token)):
            spelled[id] = bytes.fromhex(byte[1])
        else:
            spelled[id] = (token if level else token.replace(SPACE, " ")).encode()
    return spelled


def read_tokenizer(
    path: Path,
    data: Mapping[str, Any],
    rows: int = MAX_SIZE,
    naming: Sequence[str] = (),
) -> tuple[Tokenizer, Encoder]:
    """The tokenizer of a parsed tokenizer.json, and what encodes for it: `Encoder`.

    Its bytes are exact. So what SentencePiece puts in front of a text, a space, is
    decoded as one, though the library leaves it out. Raises TokenizerError.
    """
    with reraise_any_as(TokenizerError, path):
        encoder = Encoder(data, rows, naming)
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
