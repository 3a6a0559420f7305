"""The text side of other families: tokenizers, chat templates and tags.

Tokenizers are trained here in the forms of the real ones; the library `tokenizers` and
transformers are the references.
"""

import json
import unicodedata
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from checkpoints import TINY
from families_text import (
    CORPUS,
    KINDS,
    LACKING,
    SETTINGS,
    SPLIT,
    TEKKEN,
    TEMPLATES,
    open_folder,
    unigram,
    write_text_side,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import generate_merges

from simplellm.api.outputs import is_reasoning
from simplellm.base.config import ConfigError
from simplellm.base.files import FolderFiles
from simplellm.text.detokenizer import StreamDecoder
from simplellm.text.dialects.dialect import Dialect, load_tokenizer_and_dialect
from simplellm.text.dialects.encoder import read_tokenizer
from simplellm.text.dialects.sandbox import (
    compile_template,
    parse_template,
    render_template,
)
from simplellm.text.dialects.template import hide_text
from simplellm.text.harmony import Message, Tool, ToolCall, from_openai, tool_calls
from simplellm.text.harmony.schema import as_tools
from simplellm.text.tokenizer import Tokenizer, TokenizerError, printed_bytes

Opened = dict[str, tuple[Tokenizer, Dialect, Any, Path]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Of each kind: our tokenizer and dialect, the library's tokenizer, the folder."""
    found = {}
    for kind in KINDS:
        folder = write_text_side(tmp_path_factory.mktemp(kind.replace(" ", "-")), kind)
        file = str(folder / "tokenizer.json")
        library = tokenizers.Tokenizer.from_file(file)
        found[kind] = (*open_folder(folder), library, folder)
    return found


Made = tuple[Tokenizer, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of a Unigram without bytes: our tokenizer, and the library's."""
    library = unigram(with_bytes=False)
    file = tmp_path_factory.mktemp("unigram") / "tokenizer.json"
    library.save(str(file))
    return read_tokenizer(file, json.loads(file.read_text("utf-8")))[0], library


NAMES = (
    "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> <|eot_id|> "
    "<|start_header_id|> <|python_tag|> <s> </s> <unk> [INST] [/INST] [TOOL_CALLS] "
    "[CALL_ID] [ARGS] "
    "<bos> <eos> <start_of_turn> <end_of_turn> <table> </td> <unused0> <0x0A> "
    "covid19"
).split()
PIECES = st.one_of(
    st.text(max_size=8),
    st.sampled_from([*NAMES, "<|", "|>", "<", ">", "[", "]", "im_end", "think"]),
    st.sampled_from([" ", "  ", "\n", "\n\n", "\n\n\n", "\t", "▁", "▁▁", "\r\n", "é"]),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


def has_name(tokenizer: Tokenizer, text: str) -> bool:
    return any(name in text for name in tokenizer.special)


# Tokenizers


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=250)
@given(text=TEXTS)
def test_texts_are_encoded_as_by_the_library(
    opened: Opened, kind: str, text: str
) -> None:
    """And names of control tokens as text, unless they are asked for."""
    tokenizer, _, library, _ = opened[kind]
    theirs = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, special=True) == theirs
    ids = tokenizer.encode(text)
    assert not any(map(tokenizer.is_special, ids))
    assert not {*ids} & {*tokenizer.special.values()}
    if not has_name(tokenizer, text):
        assert ids == theirs


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=250)
@given(text=TEXTS)
def test_streamed_bytes_add_up_to_the_librarys_text(
    opened: Opened, kind: str, text: str
) -> None:
    """But for the space that SentencePiece puts in front: bytes keep it."""
    tokenizer, _, library, _ = opened[kind]
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    streamed = "".join(map(decoder.push, ids)) + decoder.flush()
    assert streamed == tokenizer.decode(ids)
    theirs = library.decode(ids, skip_special_tokens=False)
    cut = "mistral" in kind or kind == "unigram"
    assert (streamed.removeprefix(" ") if cut else streamed) == theirs
    if kind in (
        "llama",
        "gpt2",
        "tekken",
    ):  # others change texts: NFC, or spaces for U+2581
        assert streamed == text


def test_all_bytes_of_a_family_can_be_decoded(opened: Opened) -> None:
    for kind, (tokenizer, _, library, _) in opened.items():
        assert tokenizer.vocab_size == library.get_vocab_size()
        singles = {token for token in tokenizer.tokens.values() if len(token) == 1}
        missing = {byte for byte in range(256) if bytes([byte]) not in singles}
        assert missing == {*(LACKING if kind == "smollm" else ())}


@settings(max_examples=250)
@given(text=TEXTS)
def test_pieces_need_no_bytes_beside_them(made: Made, text: str) -> None:
    """The library has the unknown one for what no piece spells: here it's left out."""
    tokenizer, library = made
    theirs = library.encode(text, add_special_tokens=False).ids
    unknown = library.token_to_id("<unk>")
    found = tokenizer.encode(text, special=True)
    if "<unk>" not in text:
        assert found == [id for id in theirs if id != unknown]
    assert unknown not in tokenizer.encode(text)
    ours = tokenizer.decode(found)
    assert ours.removeprefix(" ") == library.decode(found, skip_special_tokens=False)


def tekken_file(folder: Path) -> tiktoken.Encoding:
    """Write a tekken.json; return Mistral's own library's way to encode, tiktoken."""
    data = json.loads(KINDS["tekken"]().to_str())
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    ranks = [bytes([byte]) for byte in range(256)]
    ranks += [token for token in map(to_bytes, tokens) if len(token) > 1]
    names = TEKKEN.split()
    tekken = {
        "config": {
            "pattern": SPLIT,
            "num_vocab_tokens": len(ranks),
            "default_vocab_size": 100 + len(ranks) - 5,  # the last ones are left out
            "default_num_special_tokens": 100,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(ranks)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True}
            for rank, name in enumerate(names)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(tekken))
    return tiktoken.Encoding(
        "tekken",
        pat_str=SPLIT,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks[:-5])},
        special_tokens={},
    )


def to_bytes(token: str) -> bytes:
    return bytes(printed_bytes()[char] for char in token)


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("tekken")
    library = tekken_file(folder)
    mistral = replace(TINY, model_type="mistral", vocab_size=1000)
    tokenizer, dialect = load_tokenizer_and_dialect(FolderFiles(folder), mistral)
    assert tokenizer is not None and dialect.begin == (1,)
    return tokenizer, library


@settings(max_examples=250)
@given(text=TEXTS)
def test_mistrals_own_file_will_do(tekken: tuple[Tokenizer, Any], text: str) -> None:
    """A token's id there is its rank behind the control tokens."""
    tokenizer, library = tekken
    ids = tokenizer.encode(text)
    assert ids == [100 + rank for rank in library.encode_ordinary(text)]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]", special=True) == [3] != tokenizer.encode("[INST]")


def test_the_first_of_mistrals_files_list_no_control_tokens(tmp_path: Path) -> None:
    """NeMo's and Pixtral's; they are those that later files begin with."""
    tekken_file(tmp_path)
    file = tmp_path / "tekken.json"
    tekken = json.loads(file.read_text())
    del tekken["special_tokens"]
    file.write_text(json.dumps(tekken))
    mistral = replace(TINY, model_type="mistral", vocab_size=1000)
    tokenizer, dialect = load_tokenizer_and_dialect(FolderFiles(tmp_path), mistral)
    assert tokenizer is not None and dialect.begin == (1,)
    text = "<s>[INST]a[/INST]b</s>[TOOL_CONTENT]"
    ids = tokenizer.encode(text, special=True)
    assert [id for id in ids if id < 100] == [1, 3, 4, 2, 19]
    assert tokenizer.decode(ids) == text


def test_what_no_token_spells_is_left_out(opened: Opened, tmp_path: Path) -> None:
    """As transformers leaves it out, but for an unknown token that controls."""
    tokenizer, _, _, folder = opened["smollm"]
    theirs = AutoTokenizer.from_pretrained(str(folder))
    text = "a\x04b \x06\x13 \U000e0041c"
    ids = tokenizer.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert tokenizer.decode(ids) == theirs.decode(ids) != text
    write_text_side(tmp_path, "smollm")
    file = tmp_path / "tokenizer.json"
    config = json.loads(file.read_text("utf-8"))
    config["model"]["unk_token"] = "<|endoftext|>"
    file.write_text(json.dumps(config))
    assert open_folder(file.parent)[0].encode(text) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_text_begins_as_transformers_begins_it(opened: Opened, kind: str) -> None:
    _, dialect, _, folder = opened[kind]
    tokenizer = opened[kind][0]
    theirs = AutoTokenizer.from_pretrained(str(folder))
    expected = theirs("The dog <3")["input_ids"]
    if SETTINGS[kind].get("add_bos_token"):
        first = theirs.bos_token_id
        expected = [first, *(id for id in expected if id != first)]
    assert [*dialect.begin, *tokenizer.encode("The dog <3")] == expected
    assert len(dialect.begin) == (kind not in ("qwen", "coder", "gpt2", "smollm"))


@pytest.mark.parametrize(
    ("kind", "text", "count"),
    [
        ("gemma", "<table>a</td>\n\n\nb", 3),
        ("gemma", "<html><body><s>c</s>", 4),
        ("gemma", "<footer><iframe><bbox>", 3),
        ("qwen", "To 6G-RAN2 with covid19.", 2),
    ],
)
def test_added_tokens_may_be_text(
    opened: Opened, kind: str, text: str, count: int
) -> None:
    """HTML, white space and words, which people read and write, control nothing."""
    tokenizer, dialect, library, _ = opened[kind]
    ids = tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    known = library.get_added_tokens_decoder()
    assert sum(id in known for id in ids) == count
    assert tokenizer.decode(ids, skip_special=True) == text
    assert turn_of(dialect, tokenizer, ids) == ("", text, [])
    prompt = render(dialect, tokenizer, [{"role": "user", "content": text}], [])
    assert str(ids)[1:-1] in str(prompt)


USER_TAG = "<\uff5cUser\uff5c>"  # of DeepSeek
TAGGED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "by no one": ("Hello", {}, False),
    "by the template": ("{{ 'USER' + messages[0].content }}", {}, True),
    "by what the template reads": ("{{ 'a' if 'USER' in x }}", {}, True),
    "as the end of a turn": ("", {"eos_token": USER_TAG}, True),
    "as one of more": ("", {"extra_special_tokens": [USER_TAG]}, True),
    "with flags": (
        "",
        {"added_tokens_decoder": {"7": {"content": USER_TAG, "special": True}}},
        True,
    ),
}


@pytest.mark.parametrize("named", TAGGED)
def test_a_checkpoint_says_what_controls(tmp_path: Path, named: str) -> None:
    """Also where tokenizer.json calls no token special, as DeepSeek's distillates."""
    template, settings_, expected = TAGGED[named]
    template = template.replace("USER", USER_TAG)
    write_text_side(tmp_path, "qwen", template)
    file, own = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    own.write_text(json.dumps(json.loads(own.read_text("utf-8")) | settings_))
    config = json.loads(file.read_text("utf-8"))
    id = 1 + max(token["id"] for token in config["added_tokens"])
    user = {**config["added_tokens"][-1], "content": USER_TAG, "special": False}
    config["added_tokens"].append({**user, "id": id})
    file.write_text(json.dumps(config))
    tokenizer, _ = open_folder(file.parent)
    ids = tokenizer.encode(f"a{USER_TAG}b")
    assert (id in ids, id in tokenizer.tokens) == (not expected, not expected)
    assert id in tokenizer.encode(f"a{USER_TAG}b", special=True)
    text = "" if expected else USER_TAG
    assert tokenizer.decode([id], skip_special=True) == text


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_file_may_have_no_merges(tmp_path: Path, kind: str) -> None:
    """Then they are those that transformers makes of the tokens."""
    write_text_side(tmp_path, kind)
    file = tmp_path / "tokenizer.json"
    config = json.loads(file.read_text("utf-8"))
    vocab = config["model"]["vocab"]
    del config["model"]["merges"]
    file.write_text(json.dumps(config))
    tokenizer, _ = open_folder(file.parent)
    config["model"]["merges"] = generate_merges(vocab)
    library = tokenizers.Tokenizer.from_str(json.dumps(config))
    for text in CORPUS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids


def test_special_tokens_may_have_a_file_of_their_own(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    write_text_side(tmp_path, "gemma", template)
    own = tmp_path / "tokenizer_config.json"
    settings_ = json.loads(own.read_text("utf-8"))
    named = {name: settings_.pop(name) for name in ("bos_token", "eos_token")}
    tokenizer, dialect = open_folder(tmp_path)
    expected = dialect.render([Message("user", "a")], tokenizer)
    own.write_text(json.dumps(settings_))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer, dialect = open_folder(tmp_path)
    assert dialect.render([Message("user", "a")], tokenizer) == expected
    assert expected[0] == tokenizer.special[named["bos_token"]]


def test_an_effort_is_the_templates_own_unless_it_is_asked_for(tmp_path: Path) -> None:
    """Some templates refuse what they don't know, as Mistral's of 2026."""
    write_text_side(tmp_path, "qwen", "{{ reasoning_effort|d('none') }}")
    tokenizer, dialect = open_folder(tmp_path)
    for options, expected in (
        ({}, "none"),
        ({"reasoning_effort": "high"}, "high"),
        ({"variables": {"reasoning_effort": "max"}}, "max"),
        ({"reasoning_effort": "low", "variables": {"reasoning_effort": "no"}}, "no"),
    ):
        ids = dialect.render([Message("user", "a")], tokenizer, **options)
        assert tokenizer.decode(ids) == expected


def test_merges_make_no_control_tokens(tmp_path: Path) -> None:
    """Where a vocabulary has their names, and all that these are made of."""
    write_text_side(tmp_path, "gemma")
    file = tmp_path / "tokenizer.json"
    config = json.loads(file.read_text("utf-8"))
    model, most = config["model"], 1000
    model["vocab"] |= {"<e": most, "os>": most + 1, "os": most + 2}
    for place, char in enumerate("<eos>"):
        model["vocab"].setdefault(char, most + 3 + place)
    pairs = ["< e", "o s", "os >", "<e os>"]
    model["merges"] = [*pairs, *map(" ".join, model["merges"])]
    file.write_text(json.dumps(config))
    tokenizer, _ = open_folder(file.parent)
    ids = tokenizer.encode("<eos>")
    assert ids == [most, most + 1] and tokenizer.decode(ids) == "<eos>"


def test_an_added_token_is_what_it_says(tmp_path: Path) -> None:
    """Where the library itself makes an odd byte of its `ü`."""
    write_text_side(tmp_path, "qwen")
    file = tmp_path / "tokenizer.json"
    text = file.read_text("utf-8").replace("covid19", "Z\u00fcrich")
    file.write_text(text, "utf-8")
    tokenizer, _ = open_folder(file.parent)
    ids = tokenizer.encode("Z\u00fcrich")
    assert len(ids) == 1 and tokenizer.decode(ids) == "Z\u00fcrich"


def test_a_tokenizer_may_know_more_tokens_than_its_model(tmp_path: Path) -> None:
    """The smallest Gemma 3 has that of its sisters, with a token for images."""
    write_text_side(tmp_path, "gemma")
    file = tmp_path / "tokenizer.json"
    config = json.loads(file.read_text("utf-8"))
    rows = open_folder(file.parent)[0].vocab_size
    image = {**config["added_tokens"][0], "id": rows, "content": "<image_soft_token>"}
    more = {**image, "id": rows + 1, "content": "<svg>", "special": False}
    config["added_tokens"] += [image, more]
    file.write_text(json.dumps(config))
    gemma = replace(TINY, model_type="gemma3_text", vocab_size=rows)
    tokenizer, dialect = load_tokenizer_and_dialect(FolderFiles(tmp_path), gemma)
    assert tokenizer is not None and tokenizer.vocab_size == rows
    user = {"role": "user", "content": "<image_soft_token><svg>"}
    ids = render(dialect, tokenizer, [user], [])
    assert max(ids) < rows and user["content"] in tokenizer.decode(ids)
    with pytest.raises(ConfigError, match=r"has \d+ token ids; expected at most"):
        load_tokenizer_and_dialect(
            FolderFiles(tmp_path), replace(gemma, vocab_size=300)
        )


def put(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """Change a field of a tokenizer.json, or an entry of a list in it."""

    def edit(config: dict[str, Any]) -> None:
        *way, last = path.split(".")
        place: Any = config
        for key in way:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value

    return edit


BAD_TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no model": (lambda config: config.pop("model"), "model is None; expected an"),
    "another model": (put("model.type", "WordLevel"), "model.type is 'WordLevel'"),
    "no pieces": (put("model.type", "Unigram"), "model.vocab is dict; expected a list"),
    "an old WordPiece": (
        lambda config: [config["model"].pop(key) for key in ("type", "merges")],
        "model.type is None; expected one of 'BPE'",
    ),
    "vocab": (put("model.vocab", [["a", 0]]), "model.vocab is list; expected an obj"),
    "an id of text": (put("model.vocab.a", "0"), "a token's id is '0'; expected 0 to"),
    "an id below 0": (put("model.vocab.zz", -1), "a token's id is -1; expected 0 to"),
    "an id twice": (put("model.vocab.zz", 1), "ids that two tokens have is 1"),
    "merges": (put("model.merges", [["qq", "zz"]]), "Token `qq` out of vocabulary"),
    "decoder": (put("decoder", None), "decoder is 'null'; expected one with ByteLevel"),
    "pieces": (put("pre_tokenizer", {"type": "?"}), "Exception: data did not match"),
    "no added tokens": (lambda config: config.pop("added_tokens"), "added_tokens is"),
    "an added token": (put("added_tokens", [5]), "an entry of added_tokens is int"),
    "a name": (put("added_tokens.0.content", ""), "a name in added_tokens is ''"),
    "half a character": (
        put("added_tokens.0.content", "<\ud800>"), "can't encode character",
    ),
    "what comes first": (
        put(
            "post_processor",
            {"single": [{"SpecialToken": {"id": "x"}}],
             "special_tokens": {"x": {"ids": [10**9]}}},
        ),
        "post_processor is (1000000000,); expected ids of control tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_bad_tokenizers_are_refused(name: str, tmp_path: Path) -> None:
    """With the name of the file, and of what is wrong in it."""
    edit, words = BAD_TOKENIZERS[name]
    write_text_side(tmp_path, "qwen")
    file = tmp_path / "tokenizer.json"
    config = json.loads(file.read_text("utf-8"))
    edit(config)
    file.write_text(json.dumps(config))
    with pytest.raises(TokenizerError) as caught:
        open_folder(file.parent)
    assert str(caught.value).startswith(f"{file}: ") and words in str(caught.value)


def test_lone_surrogates_are_refused(opened: Opened) -> None:
    for tokenizer, _, _, _ in opened.values():
        with pytest.raises(TokenizerError, match="lone surrogate"):
            tokenizer.encode("a\ud800")


# Chat templates

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city, in <b>words</b>.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Öland"]}},
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
USER = {"role": "user", "content": " What is the weather in Rome? "}
CALL = {
    "id": "000000000",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome", "n": [1]}'},
}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "000000000", "content": '{"sky": "blue"}'}
SECOND = {**CALL, "id": "000000001"}
BOTH = {**CALLS, "tool_calls": [CALL, SECOND]}
LATER = {**RESULT, "tool_call_id": "000000001", "content": "Rain."}
ANSWER = {"role": "assistant", "content": "Blue, I think."}
THOUGHT = {**ANSWER, "reasoning_content": "The sky is blue."}
MORE = {"role": "user", "content": "And tomorrow?\n\n\nTell me."}
CHATS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "one turn": ([USER], False),
    "a system message": ([SYSTEM, USER], False),
    "several turns": ([SYSTEM, USER, ANSWER, MORE], False),
    "reasoning": ([USER, THOUGHT, MORE], False),
    "tools": ([SYSTEM, USER], True),
    "a call": ([SYSTEM, USER, CALLS, RESULT], True),
    "a call that was thought of": (
        [USER, {**CALLS, "reasoning_content": "Hm.\nI'll look."}, RESULT],
        True,
    ),
    "a call, and on": ([USER, CALLS, RESULT, ANSWER, MORE], True),
    "two calls": ([SYSTEM, USER, BOTH, RESULT, LATER, ANSWER, MORE], True),
    "results in another order": ([USER, BOTH, LATER, RESULT, ANSWER, MORE], True),
    "a call beside text": ([USER, {**CALLS, "content": "I'll look."}, RESULT], True),
}
DATE = "26 Jul 2024"


def render(
    dialect: Dialect, tokenizer: Tokenizer, chat: Sequence[Any], tools: Sequence[Any]
) -> list[int]:
    functions = as_tools(tools)
    messages = from_openai(chat, functions, dialect.lead)
    return dialect.render(messages, tokenizer, tools=functions, current_date=DATE)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_chats_are_rendered_as_by_transformers(
    opened: Opened, kind: str, chat: str, record_property: Any
) -> None:
    record_property("kind", kind)
    messages, offered = CHATS[chat]
    if kind in ("gemma", "smollm") and offered:
        pytest.skip("its template knows no calls")
    tools = [WEATHER] if offered else []
    tokenizer, dialect, _, folder = opened[kind]
    if kind == "llama" and BOTH in messages:
        with pytest.raises(ValueError, match="only supports single tool-calls"):
            render(dialect, tokenizer, messages, tools)
        return
    theirs = AutoTokenizer.from_pretrained(str(folder))
    given_theirs = json.loads(json.dumps(messages))
    for message in given_theirs:
        for call in message.get("tool_calls", ()):  # as its documentation advises
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.loads(arguments)
    expected = theirs.apply_chat_template(
        given_theirs,
        tools=tools or None,
        add_generation_prompt=True,
        date_string=DATE,
        tokenize=False,
    )
    ids = render(dialect, tokenizer, messages, tools)
    assert tokenizer.decode(ids) == expected or "mistral" in kind
    assert ids == theirs(expected, add_special_tokens=False)["input_ids"]
    begin = {*dialect.begin}
    assert sum(id in begin for id in ids) == len(begin), "once, by the template"


HARMLESS = "x"


@pytest.mark.parametrize("kind", TEMPLATES)
@settings(max_examples=150)
@given(texts=st.tuples(TEXTS, TEXTS, TEXTS, TEXTS))
def test_no_message_becomes_a_control_token(
    opened: Opened, kind: str, texts: tuple[str, ...]
) -> None:
    """A prompt has those of the same chat about nothing, whatever is in its texts."""
    tokenizer, dialect, _, _ = opened[kind]

    def control(texts: Sequence[str]) -> list[int]:
        # Templates leave out what is empty and look for what is equal; nothing is.
        system, user, answer, more = (f"a{t}{n}" for n, t in enumerate(texts))
        chat: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer, "reasoning": more},
            {"role": "user", "content": more},
        ]
        tools = []
        if kind not in ("gemma", "smollm"):
            properties = {answer: {"type": "string", "description": system}}
            schema = {"type": "object", "properties": properties}
            tools = [{"function": {"name": "f", "parameters": schema}}]
            tools[0]["function"]["description"] = user
            arguments = json.dumps({user: [answer]})
            call = {"id": 1, "function": {"name": "f", "arguments": arguments}}
            chat[3:3] = [
                {"role": "user", "content": more},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": 1, "content": answer},
                {"role": "assistant", "content": system},
            ]
        ids = render(dialect, tokenizer, chat, tools)
        return [id for id in ids if tokenizer.is_special(id)]

    assert control(texts) == control([HARMLESS] * 4)


def test_a_message_says_what_it_says(opened: Opened) -> None:
    """Names of control tokens are still there, as text."""
    for kind in TEMPLATES:
        tokenizer, dialect, _, _ = opened[kind]
        text = " ".join([*tokenizer.special, "\ue000 \uf8ff"])
        ids = render(dialect, tokenizer, [{"role": "user", "content": text}], [])
        assert text in tokenizer.decode(ids)


def test_half_a_character_stands_for_nothing(opened: Opened) -> None:
    """What stands in for `<` while a template runs is no text that anyone may send."""
    tokenizer, dialect, _, _ = opened["qwen"]
    for stand_in in map(chr, range(0xD800, 0xD820)):
        with pytest.raises(TokenizerError, match="a message"):
            render(dialect, tokenizer, [{"role": "user", "content": stand_in}], [])


def test_a_template_may_be_a_file_or_one_of_several(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "<|im_start|>{{ messages[0].content }}"},
        {"name": "tool_use", "template": "<|im_end|>{{ tools|length }}"},
    ]
    write_text_side(tmp_path, "qwen", named)
    tokenizer, dialect = open_folder(tmp_path)
    ids = render(dialect, tokenizer, [USER], [])
    assert tokenizer.decode(ids) == f"<|im_start|>{USER['content']}"
    ids = render(dialect, tokenizer, [USER], [WEATHER])
    assert tokenizer.decode(ids) == "<|im_end|>1"
    write_text_side(tmp_path, "qwen", "")
    file = tmp_path / "chat_template.json"  # as processors had it
    file.write_text(json.dumps({"chat_template": "{{ messages|length }}<|im_start|>"}))
    tokenizer, dialect = open_folder(tmp_path)
    assert tokenizer.decode(render(dialect, tokenizer, [USER], [])) == "1<|im_start|>"
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"chat_template\.json: is not JSON"):
        open_folder(tmp_path)
    file.unlink()
    text = "{% generation %}{{ messages|length }}{% endgeneration %}<|im_end|>"
    (tmp_path / "chat_template.jinja").write_text(text)
    tokenizer, dialect = open_folder(tmp_path)
    assert tokenizer.decode(render(dialect, tokenizer, [USER], [])) == "1<|im_end|>"
    (folder := tmp_path / "additional_chat_templates").mkdir()
    (folder / "tool_use.jinja").write_text(named[1]["template"])
    tokenizer, dialect = open_folder(tmp_path)
    assert tokenizer.decode(render(dialect, tokenizer, [USER], [])) == "1<|im_end|>"
    ids = render(dialect, tokenizer, [USER], [WEATHER])
    assert tokenizer.decode(ids) == "<|im_end|>1"


def test_base_models_have_no_chats(opened: Opened, tmp_path: Path) -> None:
    without = [opened["gpt2"][:2]]
    empty: list[Any] = ["", []]
    for template in empty:
        write_text_side(tmp_path, "qwen", template)
        without.append(open_folder(tmp_path))
    for tokenizer, dialect in without:
        with pytest.raises(ValueError, match=r"this model is None.* `generate`"):
            render(dialect, tokenizer, [USER], [])


GIVEN = "messages[1].tool_calls[0].function.arguments"
PROGRAMS = (
    "{% for m in messages %}{{ m.content.replace('a', 'b').replace('b', 'c', 1) }}"
    "{{ ', '.join([m.role, 'x']) }}{{ m.content.strip().split('\n')[0] }}{% endfor %}",
    "{% set all %}{% for m in messages %}{{ m.content|replace('a', 'b')|trim }}"
    "{% endfor %}{% endset %}{{ all|length }}{{ all|upper }}{{ all[::-1] }}",
    "{{ messages|join('|', attribute='role') }}"
    "{{ messages|map(attribute='role')|join }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ G|tojson(indent=2) }}{{ G|items|list }}{{ G|dictsort }}{{ G|string }}{{ G }}",
    "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}"
    "{% for m in messages %}{% call f(m.role) %}!{% endcall %}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% for m in messages %}{% if not loop.last %}"
    "{% set n.x = n.x + [m.role, loop.index, loop.nextitem.role] %}{% endif %}"
    "{% endfor %}{{ n.x }}{{ n.x * 2 }}{{ 'ab' * 3 }}{{ 7 // 2 }}{{ 7 % 4 }}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}"
    "{% break %}{% endfor %}{% filter upper %}é{{ messages[-1].role }}{% endfilter %}",
    "{{ nothing }}{{ nothing|d('-') }}{{ messages[0].none is defined }}"
    "{{ messages[0].get('none', 1) }}{{ dict(messages[0], z=None) }}{{ [true, 1.0] }}",
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_templates_mean_what_they_do_to_transformers(
    opened: Opened, program: str
) -> None:
    call = {"function": {"name": "f", "arguments": {"city": [1], "a": "é<"}}}
    messages = [{**USER, "content": "a\nab "}, {**ANSWER, "tool_calls": [call]}]
    program = program.replace("G", GIVEN)
    theirs = AutoTokenizer.from_pretrained(str(opened["qwen"][3]))
    expected = theirs.apply_chat_template(
        messages, chat_template=program, tokenize=False
    )
    found = render_template(
        compile_template(parse_template(program), {}), {"messages": messages}, {}
    )
    assert found == expected != ""


# A template that looks for what only looks like a control token, and finds it.
LOOKING = (
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}",
    "{{ m.content.startswith('<think>') }}{{ m.content.rfind('>') }}",
    "{{ m.content.startswith(('<a>', '<think>')) or 'no' }}",
    "{{ m.content|replace('<think>', '[') }}{{ m.content.replace('</think>', '<') }}",
    "{{ m.content.removeprefix('<think>').partition('</think>')[0] }}",
    "{{ messages|selectattr('content', 'equalto', '<b>')|list|length }}",
    "{{ m.content == '<b>' }}{{ '<b>' != m.content }}{{ m.content in ['<b>', 'c'] }}",
    "{{ 'x' if m.content is eq('<b>') else m.content|tojson(ensure_ascii=true) }}",
    "{% set t = '<b>' %}{{ t in m.content }}{{ m.content == t }}{{ t.find('>') }}",
    "{% set n = namespace(s='<think>') %}{{ m.content.startswith(n.s) }}{{ n.s == 1 }}",
    "{{ m }}{{ m|string }}{{ 'a' ~ m ~ [m.content] }}{{ [m]|string|length }}",
    "{% generation %}{% set x = m.content ~ '<b>' %}{{ x }}{% endgeneration %}{{ x }}",
    # Also in a text of which it has written a part itself, as Nemotron's does
    "{% set c = '<i></i>' ~ m.content %}{{ c.split('</i>')[-1] }}{{ c.rsplit('>', 1) }}"
    "{{ c.partition('<b') }}{{ c.partition('none') }}{{ c.split('>', maxsplit=2) }}",
    "{% set c = m.content ~ ' <b>' %}{{ c.replace('<b>', '!') }}"
    "{{ c|replace('<b>', '<', 1) }}{{ c.removeprefix('<b') }}{{ c.rpartition('>')[0] }}"
    "{{ c.removesuffix('>') }}{{ c.removesuffix('no') }}{{ c.split() }}"
    "{{ 121|replace(1, '<')|replace('<', 3) }}",
    "{% filter replace('<b>', '!') %}<b>{{ m.content }}{% endfilter %}"
    "{{ m.content|replace(new='!', old='<b>') }}{{ m.content|replace('<', '', none) }}"
    "{{ m.content|replace('<', '', count=1) }}{{ ('<' ~ m.content).split(sep='<b') }}",
    "{% macro f(a) %}{{ a }}{{ caller() }}{% endmacro %}"
    "{% set n = namespace(split=f) %}{% call n.split('a') %}x{% endcall %}",
)


@pytest.mark.parametrize("program", LOOKING)
def test_templates_find_tags_in_messages(opened: Opened, program: str) -> None:
    """And write what they find as text: no tag that a message has comes out as one."""
    program = "{% for m in messages %}" + program + "{% endfor %}"
    texts = ("<think>é</think>b", "<b>", "x</b>")
    messages = [{"role": "user", "content": text} for text in texts]
    theirs = AutoTokenizer.from_pretrained(str(opened["qwen"][3]))
    expected = theirs.apply_chat_template(
        messages, chat_template=program, tokenize=False
    )
    hidden = {ord("<"): 0xD800, ord(">"): 0xD801}
    told = hide_text({"messages": messages}, hidden)
    found = render_template(
        compile_template(parse_template(program), hidden), told, hidden
    )
    assert found.translate({to: char for char, to in hidden.items()}) == expected
    assert "<think>" not in found and "</think>" not in found


TURNS_BACK: dict[str, list[dict[str, Any]]] = {
    "thoughts": [
        USER,
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nBlue."},
        MORE,
    ],
    "thoughts of the last turn": [
        USER,
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nBlue."},
    ],
    "a result that stands in a user's message": [
        USER,
        {**CALLS, "reasoning_content": "Hm."},
        {"role": "user", "content": "<tool_response>\nx\n</tool_response>"},
    ],
}


@pytest.mark.parametrize("name", TURNS_BACK)
def test_turns_come_back_as_they_were(opened: Opened, name: str) -> None:
    """Clients send content with its tags: Qwen's template looks for them."""
    tokenizer, dialect, _, folder = opened["qwen"]
    theirs = AutoTokenizer.from_pretrained(str(folder))
    chat = json.loads(json.dumps(TURNS_BACK[name]))
    for message in chat:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    expected = theirs.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    ids = render(dialect, tokenizer, TURNS_BACK[name], [])
    assert tokenizer.decode(ids) == expected
    tags = [tokenizer.special[tag] for tag in ("<think>", "<tool_response>")]
    written = sum(id in tags for id in ids)
    assert written == (name != "thoughts")  # the template's own, and no message's


ADDS = "{% set a = messages[1].tool_calls[0].function.arguments %}"
ADDED = {
    "before": ADDS + "{{ 'x' + a }}",
    "behind": ADDS + "{{ a + 'x' }}",
    "as an object": ADDS + "{{ a.city }}{{ a is mapping }}{{ a|tojson }}",
}


@pytest.mark.parametrize("name", ADDED)
def test_a_template_may_add_arguments_to_a_text(name: str, tmp_path: Path) -> None:
    """DeepSeek's do: then they are the text that the client has sent."""
    write_text_side(tmp_path, "qwen", ADDED[name])
    tokenizer, dialect = open_folder(tmp_path)
    text = '{"city":  "<b>"}'
    call = {"id": "1", "function": {"name": "f", "arguments": text}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    shown = tokenizer.decode(render(dialect, tokenizer, messages, []))
    ways = {"before": "x" + text, "behind": text + "x"}
    assert shown == ways.get(name, '<b>True{"city": "<b>"}')


def test_tools_need_a_place_in_the_template(opened: Opened) -> None:
    """They aren't left out without a word."""
    for kind in TEMPLATES:
        tokenizer, dialect, _, _ = opened[kind]
        if kind in ("gemma", "smollm"):
            with pytest.raises(ValueError, match=r"tools .*'get_weather'.* no place"):
                render(dialect, tokenizer, [USER], [WEATHER])
        else:
            shown = tokenizer.decode(render(dialect, tokenizer, [USER], [WEATHER]))
            assert "get_weather" in shown


REFUSED = {
    "a syntax error": ("{{ messages", "TemplateSyntaxError"),
    "an unknown filter": ("{{ 'x'|centre(9) }}", "No filter named 'centre'"),
    "not text": (5, "a chat template is int"),
    "a list of text": (["x"], "a named chat template is str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_templates_are_refused_at_once(tmp_path: Path, name: str) -> None:
    template, words = REFUSED[name]
    write_text_side(tmp_path, "qwen", template)
    with pytest.raises(ConfigError) as caught:
        open_folder(tmp_path)
    place = tmp_path / "tokenizer_config.json: chat_template: "
    assert str(caught.value).startswith(str(place))
    assert words in str(caught.value)


HARMFUL = {
    "two loops": "{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "a macro": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "attributes": "{{ messages.__class__.__mro__ }}",
    "attributes of a namespace": "{{ namespace(__class__=1) }}",
    "a format that reads attributes": (
        "{{ ('<{0.__globals__}' ~ messages)|cut('format', raise_exception) }}"
    ),
    "such a format by its name": "{{ ['<{0}']|map('cut', 'format', 1)|list }}",
    "changes": "{{ messages.append(1) }}",
    "other files": "{% include 'x' %}",
    "its own wish": "{{ raise_exception('no, thanks') }}",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_templates_can_do_little_harm(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end soon, with an error that names the file and the field."""
    monkeypatch.setattr("simplellm.text.dialects.sandbox.MOST_SECONDS", 1.0)
    source = "{% set r = range(100000) %}" + HARMFUL[name]
    write_text_side(tmp_path, "qwen", source)
    tokenizer, dialect = open_folder(tmp_path)
    # Clients see it: nothing in front of the file's name.
    with pytest.raises(ValueError, match=r"^tokenizer_config\.json: chat_template: "):
        render(dialect, tokenizer, [USER], [])


# What the model writes

QWEN_TURN = (
    "<think>\nRome, then.\n</think>\n\nI'll look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Ro}m\\"e", "n": [1, {}]}}\n'
    '</tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
)
QWEN_PARTS = (
    "Rome, then.",
    "I'll look.",
    [
        ToolCall("get_weather", '{"city": "Ro}m\\"e", "n": [1, {}]}'),
        ToolCall("f", "{}"),
    ],
)
TURNS: dict[str, tuple[str, str, tuple[str, str, list[ToolCall]]]] = {
    "thoughts and calls": ("qwen", QWEN_TURN, QWEN_PARTS),
    "an answer": ("qwen", "132.<|im_end|>", ("", "132.", [])),
    "a tag in plain text": (
        "gpt2",
        "<think>a</think><tool_call>",
        ("", "<think>a</think><tool_call>", []),
    ),
    "thoughts without an end": ("qwen", "<think>\nHm, \n", ("Hm, \n", "", [])),
    "a call that is none": (
        "qwen",
        "<tool_call>\nget_weather(Rome)\n</tool_call> ok",
        ("", "get_weather(Rome)ok", []),
    ),
    "a call without an end": (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {"x": [1, 2',
        ("", "", [ToolCall("f", '{"x": [1, 2')]),
    ),
    "a call of Llama": (
        "llama",
        '{"name": "f", "parameters": {"x": 1}}<|eot_id|>',
        ("", "", [ToolCall("f", '{"x": 1}')]),
    ),
    "a call that tells its type": (
        "llama",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}<|eom_id|>',
        ("", "", [ToolCall("f", "{}")]),
    ),
    "calls in a row": (
        "llama",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        ("", "", [ToolCall("f", '{"x": 1}'), ToolCall("g", "{}")]),
    ),
    "another object": (
        "llama",
        '{"name": "Bob", "age": 3}<|eot_id|>',
        ("", '{"name": "Bob", "age": 3}', []),
    ),
    "half an object": ("llama", '{"name": "Bo', ("", '{"name": "Bo', [])),
    "a list of calls": (
        "mistral",
        "I'll look.[TOOL_CALLS] "
        '[{"name": "f", "arguments": {"x": [1]}}, {"name": "g", "arguments": {}}]</s>',
        ("", "I'll look.", [ToolCall("f", '{"x": [1]}'), ToolCall("g", "{}")]),
    ),
    "calls with their ids": (
        "mistral",
        '[TOOL_CALLS][{"name":"f","arguments":{},"id":"a1b2c3d4e"},'
        '{"name":"g","arguments":{"y":"}]"},"id":"a1b2c3d4f"}] ok</s>',
        ("", "ok", [ToolCall("f", "{}"), ToolCall("g", '{"y":"}]"}')]),
    ),
    "a list that is none": (
        "mistral",
        '[TOOL_CALLS] [1, {"name": 2}]</s>',
        ("", '[1, {"name": 2}]', []),
    ),
    "calls between tags": (
        "tekken",
        'So:\n[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{}</s>',
        ("", "So:", [ToolCall("f", '{"x": 1}'), ToolCall("g", "{}")]),
    ),
    "a list where tags are known": (
        "tekken",
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]</s>',
        ("", "", [ToolCall("f", '{"x": 1}')]),
    ),
    "tags that name nothing": (
        "tekken",
        "[TOOL_CALLS]f it[ARGS]{}[TOOL_CALLS]g[CALL_ID]a[CALL_ID]b[ARGS]",
        ("", "f it{}g\na\nb", []),
    ),
    "a name in quotes": (
        "llama",
        r'{"name": "a\"\\b", "parameters": {}}<|eot_id|>',
        ("", "", [ToolCall(r'a"\b', "{}")]),
    ),
    "arguments first": (
        "qwen",
        '<tool_call>\n{"arguments": {"x": [1, "}"]}, "name": "a"}\n</tool_call>'
        '<tool_call>{"arguments": "{}", "name": "b"}</tool_call>',
        ("", "", [ToolCall("a", '{"x": [1, "}"]}'), ToolCall("b", "{}")]),
    ),
    "arguments first, and Llama": (
        "llama",
        '{"parameters": {"x": 1}, "name": "a"}<|eot_id|>',
        ("", "", [ToolCall("a", '{"x": 1}')]),
    ),
    "arguments first in a list": (
        "mistral",
        '[TOOL_CALLS] [{"arguments": {}, "name": "a"}, {"arguments": {}, "name": "b"}]',
        ("", "", [ToolCall("a", "{}"), ToolCall("b", "{}")]),
    ),
    "arguments of nothing": (
        "qwen",
        '<tool_call>{"arguments": {"x": 1}}</tool_call>ok',
        ("", '{"arguments": {"x": 1}}ok', []),
    ),
    "arguments first without an end": (
        "qwen",
        '<tool_call>{"arguments": {"x": 1',
        ("", '{"arguments": {"x": 1', []),
    ),
    "XML": (
        "coder",
        "I'll look.\n<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n"
        "<parameter=code>\nif x:\n    </function>\n\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=b>\n</function>\n</tool_call><|im_end|>",
        (
            "",
            "I'll look.",
            [
                ToolCall("a", r'{"x": 1, "code": "if x:\n    </function>\n"}'),
                ToolCall("b", "{}"),
            ],
        ),
    ),
    "XML from a model whose template writes JSON": (
        "qwen",
        "<tool_call><function=a><parameter=x>yes</parameter></function></tool_call>",
        ("", "", [ToolCall("a", '{"x": "yes"}')]),
    ),
    "XML that nothing closes": (
        "coder",
        "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n</tool_call> ok",
        ("", "ok", [ToolCall("a", '{"x": 1}')]),
    ),
    "XML that is cut off": (
        "coder",
        "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\nab",
        ("", "", [ToolCall("a", '{"x": 1')]),
    ),
    "a tag like XML": (
        "coder",
        "<tool_call>\n<function a>\n</tool_call>",
        ("", "<function a>", []),
    ),
    "code": (
        "llama",
        "<|python_tag|>search(x)<|eom_id|>",
        ("", "search(x)", []),
    ),
}


def turn_of(
    dialect: Dialect,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    grammar: Any = None,
) -> tuple[str, str, list[ToolCall]]:
    """Reasoning, content and calls, which the deltas have to add up to."""
    parser = dialect.parser(tokenizer, [], grammar)
    deltas = [delta for id in ids for delta in parser.push(id)] + parser.finish()
    thoughts = "".join(delta.text for delta in deltas if is_reasoning(delta))
    plain = [d for d in deltas if d.call is None and not is_reasoning(d)]
    content, calls = "".join(delta.text for delta in plain), tool_calls(parser.messages)
    for number, call in enumerate(calls):
        own = [delta for delta in deltas if delta.call == number]
        assert own[0].recipient == f"functions.{call.name}"
        assert "".join(delta.text for delta in own) == call.arguments
    assert parser.num_calls == len(calls)
    said = [m for m in parser.messages if m.recipient is None]
    assert thoughts == "".join(m.content for m in said if m.channel == "analysis")
    assert content == "".join(m.content for m in said if m.channel == "final")
    return thoughts, content, calls


@pytest.mark.parametrize("name", TURNS)
def test_turns_are_taken_apart(opened: Opened, name: str, record_property: Any) -> None:
    kind, text, expected = TURNS[name]
    record_property("kind", kind)
    record_property("calls", len(expected[2]))
    tokenizer, dialect, _, _ = opened[kind]
    ids = tokenizer.encode(text, special=True)
    assert turn_of(dialect, tokenizer, ids) == expected
    # However the text is cut into tokens.
    singles = {bytes_: id for id, bytes_ in tokenizer.tokens.items()}
    cut: list[int] = []
    for id in ids:
        own = tokenizer.tokens.get(id)
        cut += [id] if own is None else [singles[bytes([byte])] for byte in own]
    assert turn_of(dialect, tokenizer, cut) == expected


def test_schemas_say_what_xml_means(opened: Opened) -> None:
    """1 may be a number or a text; a text that is no number stays one."""
    tokenizer, dialect, _, _ = opened["coder"]
    either = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties: dict[str, Any] = {
        "zip": {"type": "string"},
        "days": {"type": "integer"},
        "sure": {"type": "boolean"},
        "list": {"type": "array"},
        "note": either,
        "none": either,
        "odd": {"type": "integer"},
        "free": {},
    }
    tool = Tool("f", "", {"type": "object", "properties": properties})
    given = {
        "zip": "1", "days": " 1", "sure": "True", "list": '["a"]', "note": "1",
        "none": "null", "odd": "one", "free": "[1]", "other": "x",
    }  # fmt: skip
    written = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in given.items()
    )
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    parser = dialect.parser(tokenizer, [], None, [tool])
    for id in tokenizer.encode(text, special=True):
        parser.push(id)
    (call,) = tool_calls([*parser.messages])
    assert json.loads(call.arguments) == {
        "zip": "1", "days": 1, "sure": True, "list": ["a"], "note": "1",
        "none": None, "odd": "one", "free": [1], "other": "x",
    }  # fmt: skip


def test_thoughts_may_begin_in_the_prompt(opened: Opened) -> None:
    tokenizer, dialect, _, _ = opened["qwen"]
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n", special=True)
    parser = dialect.parser(tokenizer, prompt, None)
    for id in tokenizer.encode("Hm.\n</think>\n\nYes.", special=True):
        parser.push(id)
    parser.finish()
    assert parser.messages == [
        Message("assistant", "Hm.", channel="analysis"),
        Message("assistant", "Yes.", channel="final"),
    ]


TAGS = "<think> </think> <tool_call> </tool_call> <|python_tag|> "
TAGS += "[TOOL_CALLS] [CALL_ID] [ARGS]"


@pytest.mark.parametrize("kind", ["qwen", "llama", "mistral", "tekken"])
@settings(max_examples=200)
@given(data=st.data())
def test_nothing_is_lost_whatever_the_tokens(
    opened: Opened, kind: str, data: st.DataObject
) -> None:
    """But white space, and what makes a call's JSON."""
    tokenizer, dialect, _, _ = opened[kind]
    token = st.integers(0, tokenizer.vocab_size + 3)
    tags = [
        tokenizer.special[name] for name in TAGS.split() if name in tokenizer.special
    ]
    token = token | st.sampled_from(tags)
    ids = data.draw(st.lists(token, max_size=40))
    thoughts, content, calls = turn_of(dialect, tokenizer, ids)
    runs = [b""]
    for id in ids:
        runs[-1] += tokenizer.tokens.get(id, b"")
        runs += [b""] if id in tags else []
    written = "".join(run.decode(errors="replace") for run in runs)
    if not calls:
        told = sorted("".join((thoughts + content).split()))
        assert told == sorted("".join(written.split()))


@settings(max_examples=60)
@given(
    name=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1),
    arguments=st.dictionaries(
        st.text(max_size=5), st.recursive(st.text(max_size=5), st.lists, max_leaves=4)
    ),
    indent=st.none() | st.integers(0, 2),
    before=st.sampled_from(["", "Well.", "{"]),
)
@example(name="0", arguments={"": "\N{LOWER ONE EIGHTH BLOCK}"}, indent=None, before="")
def test_calls_are_read_as_they_are_written(
    opened: Opened,
    name: str,
    arguments: dict[str, Any],
    indent: int | None,
    before: str,
) -> None:
    for kind, key, begin, end in (
        ("qwen", "arguments", before + "<tool_call>\n", "\n</tool_call>"),
        ("llama", "parameters", "", "<|eot_id|>"),
        ("mistral", "arguments", before + "[TOOL_CALLS] [", "]</s>"),
    ):
        tokenizer, dialect, _, _ = opened[kind]
        call = {"name": name, key: arguments}
        written = json.dumps(call, indent=indent, ensure_ascii=False)
        # Names of control tokens in it are the model's text.
        ids = [
            *tokenizer.encode(begin, special=True),
            *tokenizer.encode(written),
            *tokenizer.encode(end, special=True),
        ]
        _, content, calls = turn_of(dialect, tokenizer, ids)
        assert content == ("" if kind == "llama" else before)
        assert [call.name for call in calls] == [name]
        normal = arguments
        if kind == "qwen":  # NFC
            normal = json.loads(
                unicodedata.normalize("NFC", json.dumps(arguments, ensure_ascii=False))
            )
        if kind == "mistral":  # SentencePiece, which writes this for a space
            text = json.dumps(arguments, ensure_ascii=False)
            normal = json.loads(text.replace("\N{LOWER ONE EIGHTH BLOCK}", " "))
        assert json.loads(calls[0].arguments) == normal
