"""The tokenizer against Hugging Face `tokenizers` on the same tokenizer.json."""

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

import simplellm
from simplellm.text.detokenizer import StreamDecoder
from simplellm.text.tokenizer import Tokenizer, TokenizerError

EMBEDDED = Path(simplellm.__file__).parent / "embedded" / "tokenizer.json"
PATTERN = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<|end|>", "<|start|>", "<|endoftext|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The lazy dog sleeps.",
    "def encode(text):\n    return [ord(letter) for letter in text]\n\n",
    "Größe, façade, naïve; 12345 + 678 = 13023; grüße aus Köln, Größe 43",
    "これはトークンです。これはペンです。",
    "<|start|>user<|message|>Hi<|end|> <|start|>assistant",
]


def train(pattern: str, size: int = 500) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE in which every split is a merge."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    model.add_special_tokens(SPECIAL)
    config = json.loads(model.to_str())
    vocab = config["model"]["vocab"]
    config["model"]["merges"] = [
        [token[:cut], token[cut:]]
        for token in sorted(vocab, key=vocab.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    config["model"]["ignore_merges"] = True
    return config


CONFIG = train(PATTERN)


def load(config: Any, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_file(path)


@pytest.fixture(scope="module", params=["trained", "embedded"])
def pair(request, tmp_path_factory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours and theirs, from one file."""
    if request.param == "embedded":
        path = EMBEDDED
    else:
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return Tokenizer.from_file(path), tokenizers.Tokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load(CONFIG, tmp_path_factory.mktemp("tokenizer"))


TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.text("aeinrstodg  \n\t019'\0", max_size=20),
        st.sampled_from([*CORPUS, *SPECIAL, "<|start", "e\u0301", "\u3000", "👩‍👩‍👧"]),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=300)
@given(text=TEXTS)
def test_agrees_with_tokenizers(pair, text) -> None:
    ours, theirs = pair
    theirs.encode_special_tokens = True  # as text
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert not any(ours.is_special(id) for id in ids)
    assert ours.decode(ids) == text
    theirs.encode_special_tokens = False  # as control tokens
    with_controls = ours.encode(text, special=True)
    assert with_controls == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(with_controls) == text
    assert ours.decode(with_controls, skip_special=True) == theirs.decode(
        with_controls, skip_special_tokens=True
    )


def test_any_encoder_and_table_make_a_tokenizer() -> None:
    # What a family with another library fills in: bytes, names, a function.
    spaces = {1: "\u2581a".replace("\u2581", " ").encode(), 2: "\u00e9".encode()[:1]}
    seen = []

    def encode(text: str, special: bool) -> list[int]:
        seen.append((text, special))
        return [1]

    made = Tokenizer(spaces, {"<s>": 0}, encode)
    assert made.encode("x") == made.encode("y", special=True) == [1]
    assert seen == [("x", False), ("y", True)]
    assert made.decode([0, 1, 2, 9]) == "<s> a\ufffd<|reserved_9|>"
    assert made.decode([0, 1, 9], skip_special=True) == " a"
    assert made.vocab_size == 3 and made.is_special(0) and made.is_special(9)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        made.encode("\udc00")


def test_controls_are_text_unless_asked_for(tokenizer) -> None:
    end = tokenizer.special["<|end|>"]
    assert tokenizer.encode("a<|end|>", special=True)[-1] == end
    assert end not in tokenizer.encode("a<|end|>")
    assert tokenizer.is_special(end) and not tokenizer.is_special(97)
    assert tokenizer.token_bytes(end) == b"<|end|>"
    assert tokenizer.vocab_size == max(tokenizer.special.values()) + 1


def test_ids_behind_the_tokenizer_are_reserved(tokenizer) -> None:
    id = tokenizer.vocab_size + 5
    assert tokenizer.is_special(id)
    assert tokenizer.decode([id]) == f"<|reserved_{id}|>"
    assert tokenizer.decode([id], skip_special=True) == ""


@settings(max_examples=200)
@given(text=TEXTS)
def test_stream_gives_whole_characters(tokenizer, text) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    decoder = StreamDecoder(tokenizer)
    so_far = ""
    for id in tokenizer.encode(text):
        so_far += decoder.push(id)
        assert text.startswith(so_far)
    assert so_far == text and decoder.flush() == ""


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 520) | st.integers(0, 255)), skip=st.booleans())
def test_stream_of_any_ids_adds_up_to_decode(tokenizer, ids, skip) -> None:
    decoder = StreamDecoder(tokenizer, skip_special=skip)
    streamed = "".join(decoder.push(id) for id in ids) + decoder.flush()
    kept = [id for id in ids if not (skip and tokenizer.is_special(id))]
    whole = b"".join(map(tokenizer.token_bytes, kept)).decode(errors="replace")
    assert streamed == whole == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize(
    "text", ["a" * 100_000, "é" * 100_000, "9" * 100_000, "x\n" * 50_000, "^" * 100_000]
)
def test_long_runs_take_no_quadratic_time(tokenizer, text) -> None:
    def seconds(part: str) -> float:
        start = time.thread_time()  # which a busy machine does not add to
        assert tokenizer.decode(tokenizer.encode(part)) == part
        return time.thread_time() - start

    tenth = min(seconds(text[: len(text) // 10]) for _ in range(5))
    # Linear is 10 times as long, quadratic 100 times.
    assert min(seconds(text) for _ in range(5)) < 40 * max(tenth, 0.002)


@pytest.mark.parametrize("text", [" " * 1_000_000, "\t " * 500_000, "a" * 1_000_000])
def test_a_million_characters_in_a_run_encode(tokenizer, text) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text, error, words",
    [
        (b"bytes", TypeError, "text is bytes; expected str"),
        (None, TypeError, "text is None; expected str"),
        ("ab\ud83d", TokenizerError, r"lone surrogate U\+D83D at position 2"),
        ("\ud83d\ude00", TokenizerError, r"lone surrogate U\+D83D at position 0"),
    ],
)
def test_text_that_cannot_be_encoded_is_named(tokenizer, text, error, words) -> None:
    with pytest.raises(error, match=words):
        tokenizer.encode(text)


def test_files_that_are_no_tokenizer_are_named(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: .*No such file.*expected"
    ):
        Tokenizer.from_file(path)
    with pytest.raises(TokenizerError, match="Is a directory; expected"):
        Tokenizer.from_file(tmp_path)
    path.write_bytes(b"{")
    with pytest.raises(TokenizerError, match="not JSON"):
        Tokenizer.from_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="not JSON"):
        Tokenizer.from_file(path)
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(TokenizerError, match="not JSON"):
        Tokenizer.from_file(path)


def changed(*keys: Any) -> Callable[[Any], Any]:
    """A function that sets an entry of a nested tokenizer.json."""

    def change(config: Any) -> Any:
        *path, last, value = keys
        inner = config
        for key in path:
            inner = inner[key]
        inner[last] = value
        return config

    return change


def without(*keys: Any) -> Callable[[Any], Any]:
    """A function that deletes an entry of a nested tokenizer.json."""

    def change(config: Any) -> Any:
        *path, last = keys
        inner = config
        for key in path:
            inner = inner[key]
        del inner[last]
        return config

    return change


OWN_ID = r"ids repeat or are out of range; expected each token to have its own, from 0"
KIND = r"it has .*; expected \['BPE', None, 'Sequence', 'Split', .*\] as in gpt-oss"
NO_BYTE = (
    "not byte-level: '{}' stands for no byte, or for one that is no token; expected"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
STEPS = ("pre_tokenizer", "pretokenizers")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda config: [config], "holds a JSON list; expected an object"),
        (without("model"), "not a tokenizer.json .*'model'"),
        (without("added_tokens"), "not a tokenizer.json .*'added_tokens'"),
        (changed("model", "type", "WordPiece"), KIND),
        (changed("model", "vocab", ["a"]), "not a tokenizer.json"),
        (changed("model", "vocab", "a", "one"), "not a tokenizer.json"),
        (changed("model", "merges", 0, ["a"]), "not a tokenizer.json"),
        (changed("model", "vocab", "▁the", 497), NO_BYTE.format("▁")),
        (without("model", "vocab", "A"), NO_BYTE.format("A")),
        (lambda config: swapped(config), "merges do not stand in the order of their"),
        (changed("model", "vocab", "Ġzz", 65), OWN_ID),
        (changed("model", "vocab", "Ġzz", -1), OWN_ID),
        (changed("model", "vocab", "Ġzz", 2**32), OWN_ID),
        (changed("model", "vocab", "Ġzz", 10**30), OWN_ID),
        (lambda config: marked_as(config, config["model"]["vocab"]["5"]), OWN_ID),
        (lambda config: marked_as(config, -1), OWN_ID),
        (changed("normalizer", {"type": "NFC"}), KIND),
        (changed("pre_tokenizer", None), "not a tokenizer.json .*TypeError"),
        (
            changed("pre_tokenizer", BYTE_LEVEL),
            "not a tokenizer.json .*'pretokenizers'",
        ),
        (changed(*STEPS, 0, "behavior", "Removed"), KIND),
        (changed(*STEPS, 0, "pattern", {"Regex": 5}), "not a tokenizer.json .*"),
        (
            changed(*STEPS, 0, "pattern", {"Regex": "(a"}),
            r"'\(a' is not a regular expression",
        ),
    ],
)
def test_what_a_file_lacks_is_named(tmp_path, change, words) -> None:
    with pytest.raises(TokenizerError, match=words):
        load(change(copy.deepcopy(CONFIG)), tmp_path)


def marked_as(config: Any, id: int) -> Any:
    config["added_tokens"][0]["id"] = id
    return config


def swapped(config: Any) -> Any:
    merges = config["model"]["merges"]
    merges[0], merges[-1] = merges[-1], merges[0]
    return config


def test_merges_may_be_strings(tmp_path, tokenizer) -> None:
    config = copy.deepcopy(CONFIG)
    merges = config["model"]["merges"]
    config["model"]["merges"] = [" ".join(merge) for merge in merges]
    text = "".join(CORPUS)
    assert load(config, tmp_path).encode(text) == tokenizer.encode(text)


def test_controls_may_stand_in_the_vocabulary_too(tmp_path, tokenizer) -> None:
    config = copy.deepcopy(CONFIG)
    config["model"]["vocab"] |= {t["content"]: t["id"] for t in config["added_tokens"]}
    loaded = load(config, tmp_path)
    assert loaded.encode("<|end|>") == tokenizer.encode("<|end|>")
    assert loaded.special == tokenizer.special
    assert all(loaded.is_special(id) for id in loaded.special.values())
