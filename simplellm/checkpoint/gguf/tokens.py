"""From a GGUF file's metadata to the tokenizer files that the hub has for the model.

These are tokenizer.json, tokenizer_config.json and generation_config.json. The metadata
names its pre-tokenizer, which is the rule by which a text is cut before its pieces are
merged; the rules themselves are below, as the hub's files have them.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from simplellm.base.config import expect, expect_type, one_of
from simplellm.checkpoint.gguf.container import Container

NO_TOKEN = 2**32 - 1  # what llama.cpp takes for none
SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
# What llama.cpp calls kinds of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class PreTokenizer(NamedTuple):
    """How a byte-level tokenizer cuts a text into the pieces that it merges in."""

    steps: Sequence[Mapping[str, Any]]  # of tokenizer.json, without the last
    nfc: bool = False  # characters are composed first
    ignore_merges: bool = False  # a piece that is a token is that token
    begins: bool = False  # a text begins with bos_token, unless the file says otherwise


def split_steps(*patterns: str) -> list[dict[str, Any]]:
    """Steps that each cut out what a regular expression finds."""
    cut = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [{**cut, "pattern": {"Regex": pattern}} for pattern in patterns]


WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{ENDINGS}|{WORDS}|\p{{N}}{{1,3}}|{SIGNS}"
QWEN2_SPLIT = rf"{ENDINGS}|{WORDS}|\p{{N}}|{SIGNS}"
# A word by its letters' case: any capitals in front, then small ones; or capitals.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*",
)
PATHS = SIGNS.replace("[\\r\\n]*", "[\\r\\n/]*")
TEKKEN_SPLIT = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{PATHS}"
GPT4O_SPLIT = rf"{CASED[0]}{ENDINGS}?|{CASED[1]}{ENDINGS}?|\p{{N}}{{1,3}}|{PATHS}"
EASTERN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CODER_SPLITS = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EASTERN
# Of scripts with two cases, those that Unicode had when DeepSeek listed their letters.
TWO_CASES = (
    r"[[\p{Lu}\p{Ll}\p{Lt}\x{295}]&&[\x{0}-\x{55f}\x{10a0}-\x{10c5}\x{13a0}-\x{1c7f}"
    r"\x{1c90}-\x{2cff}\x{a640}-\x{a78f}\x{ab70}-\x{ffff}\x{10400}-\x{1044f}"
    r"\x{104b0}-\x{104ff}\x{10c80}-\x{10cff}\x{118a0}-\x{118df}\x{1e900}-\x{1e95f}]]"
)
FULL_WIDTH = "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
DEEPSEEK_SPLITS = (
    *(r"[\r\n]", rf"\s?{TWO_CASES}+", rf"\s?[!-/:-~{FULL_WIDTH}]+", r"\s+$", EASTERN),
    r"\p{N}+",
)
# GPT-2's rule after another one for signs, and before one for digits.
GPT2_SPLIT = "|".join(
    (r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)")
)
DEFAULT_SPLITS = r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9]{3}"
DIGITS = {"type": "Digits", "individual_digits": True}
DEFAULT = "default"  # for a file that says nothing, as the oldest don't
# By tokenizer.ggml.pre. No steps: GPT-2's rule, which is built into the last one.
CUTS = {
    "gpt-2": PreTokenizer(()),
    "smollm": PreTokenizer((DIGITS,)),
    DEFAULT: PreTokenizer(split_steps(*DEFAULT_SPLITS)),
    "deepseek-llm": PreTokenizer(split_steps(*DEEPSEEK_SPLITS)),
    "deepseek-coder": PreTokenizer((*split_steps(*CODER_SPLITS), DIGITS)),
    "llama-bpe": PreTokenizer(
        split_steps(LLAMA3_SPLIT), ignore_merges=True, begins=True
    ),
    "qwen2": PreTokenizer(split_steps(QWEN2_SPLIT), nfc=True),
    "deepseek-r1-qwen": PreTokenizer(split_steps(QWEN2_SPLIT)),
    "tekken": PreTokenizer(split_steps(TEKKEN_SPLIT), ignore_merges=True, begins=True),
    "gpt-4o": PreTokenizer(split_steps(GPT4O_SPLIT)),
    "smaug-bpe": PreTokenizer(split_steps(LLAMA3_SPLIT)),  # of SmolLM3, too
}
CUTS |= dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), CUTS["llama-bpe"])
CUTS |= {"refact": CUTS["smollm"], "dbrx": CUTS["smaug-bpe"]}  # of Granite
CUTS |= dict.fromkeys(("mpt", "olmo", "phi-2", "gigachat", "jais"), CUTS["gpt-2"])
ONE_BY_ONE = "starcoder", "command-r", "codeshell", "exaone", "minerva-7b"
CUTS |= dict.fromkeys(ONE_BY_ONE, CUTS["smollm"])
# Control tokens that end a turn wherever they are, as llama.cpp has it: files of one
# family name the one or the other in their metadata.
TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "</s>",
)
SAMPLING = {  # by a key behind general.sampling., its name in generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class Vocabulary(NamedTuple):
    """All tokens of a file by their ids, and what each is."""

    tokens: Sequence[str]
    kinds: Sequence[int]

    def of(self, *kinds: int) -> Iterable[tuple[str, int]]:
        """The tokens of some kinds, with their ids."""
        pairs = zip(self.tokens, self.kinds, strict=True)
        return ((t, id) for id, (t, kind) in enumerate(pairs) if kind in kinds)

    def ids(self) -> dict[str, int]:
        """The id of each token; of two that are spelled alike the first counts.

        Those that are spelled by nothing are left out: no text has them.
        """
        ids_of: dict[str, int] = {}
        for text, id in self.of(NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE):
            if text:
                ids_of.setdefault(text, id)
        return ids_of


def vocabulary_of(metadata: Mapping[str, Any]) -> Vocabulary | None:
    """The tokens of a file, if it has any. Raises TypeError or ValueError."""
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    ok = isinstance(tokens, list) and all(isinstance(text, str) for text in tokens)
    expect(ok, "tokenizer.ggml.tokens", tokens, "a list of texts", TypeError)
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    expect_type("tokenizer.ggml.token_type", kinds, list, "a list")
    count = len(tokens)
    name = "the number of entries of tokenizer.ggml.token_type"
    expect(len(kinds) == count, name, len(kinds), f"{count}, as many as tokens")
    if metadata["tokenizer.ggml.model"] == "llama":  # SentencePiece's, as on the hub
        tokens = [text.replace(" ", SPACE) for text in tokens]
    return Vocabulary(tokens, kinds)


def tokenizer_data(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tokenizer.json of a file, None if it has no vocabulary.

    Raises TypeError or ValueError, which name what is not known here.
    """
    vocabulary = vocabulary_of(metadata)
    if vocabulary is None:
        return None
    kind = metadata["tokenizer.ggml.model"]
    one_of("tokenizer.ggml.model", kind, ("gpt2", "llama"))
    make = sentencepiece if kind == "llama" else byte_level
    return {"added_tokens": added_tokens(vocabulary), **make(metadata, vocabulary)}


def added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Control tokens, and those that a text is searched for before it is cut.

    Of two with one name the first counts.
    """
    tokens: dict[str, dict[str, Any]] = {}
    for special, kinds in ((True, (CONTROL, UNKNOWN)), (False, (USER_DEFINED,))):
        for text, id in filter(itemgetter(0), vocabulary.of(*kinds)):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            flags |= {"normalized": False, "special": special}
            tokens.setdefault(text, {"id": id, "content": text, **flags})
    return sorted(tokens.values(), key=lambda token: token["id"])


def byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The parts of a tokenizer.json that merges the bytes of pieces."""
    pre: Any = metadata.get("tokenizer.ggml.pre", DEFAULT)
    one_of("tokenizer.ggml.pre", pre, tuple(CUTS))
    merges = metadata.get("tokenizer.ggml.merges")
    expect_type("tokenizer.ggml.merges", merges, list, "a list")
    cut = CUTS[pre]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    last = {**level, "use_regex": not any(s["type"] == "Split" for s in cut.steps)}
    return {
        "normalizer": {"type": "NFC"} if cut.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cut.steps, last]},
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": cut.ignore_merges,
            "vocab": vocabulary.ids(),
            "merges": merges,
        },
    }


def sentencepiece(
    metadata: Mapping[str, Any], vocabulary: Vocabulary
) -> dict[str, Any]:
    """The parts of a tokenizer.json that merges characters, or else has their bytes."""
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [spaces]
    begin = None
    if prefix and "[INST]" in dict(vocabulary.of(CONTROL)):
        # Mistral's third and later, whose templates have a space behind such tokens
        words = {"type": "Metaspace", "replacement": SPACE, "split": False}
        steps, begin = [], {**words, "prepend_scheme": "first"}
    elif prefix:  # in front of each text, also behind a control token
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    count = len(vocabulary.tokens)
    scores: Any = metadata.get("tokenizer.ggml.scores", [0.0] * count)
    ok = isinstance(scores, list) and len(scores) == count
    expect(ok, "tokenizer.ggml.scores", scores, f"a list of {count}, one for a token")
    # The best first, of equal ones by their ids. What users have defined has any score,
    # and keeps its place.
    best = iter(sorted(vocabulary.of(NORMAL), key=lambda one: -scores[one[1]]))
    merged = [
        next(best)[0] if vocabulary.kinds[id] == NORMAL else text
        for text, id in vocabulary.of(NORMAL, USER_DEFINED)
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": begin,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary.ids(),
            "merges": implied_merges(merged),
        },
    }


def implied_merges(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs that merge to one of ``tokens``, which stand in the order of merging.

    SentencePiece merges any two tokens that make a third, the first of these first; of
    two ways to make it, the one with the longer left part.
    """
    known = {*tokens}
    return [
        (token[:index], token[index:])
        for token in tokens
        for index in range(len(token) - 1, 0, -1)
        if token[:index] in known and token[index:] in known
    ]


def settings_data(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json of a file: named tokens, BOS, and chat templates."""
    vocabulary = vocabulary_of(metadata)
    if vocabulary is None:
        return {}
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(id, int) and 0 <= id < len(vocabulary.tokens):
            named[f"{name}_token"] = vocabulary.tokens[id]
    cut = CUTS.get(metadata.get("tokenizer.ggml.pre", DEFAULT))
    wordy = metadata["tokenizer.ggml.model"] == "llama"
    begins = metadata.get("tokenizer.ggml.add_bos_token", wordy or (cut and cut.begins))
    others = metadata.get("tokenizer.chat_templates") or []
    names = {"default": "tokenizer.chat_template"}
    names |= {name: f"tokenizer.chat_template.{name}" for name in others}
    templates = [
        {"name": name, "template": metadata[key]}
        for name, key in names.items()
        if metadata.get(key)
    ]
    return {**named, "add_bos_token": bool(begins), "chat_template": templates}


def generation_data(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json of a file: what ends a turn, and how to sample."""
    data = {
        ours: metadata[f"general.sampling.{key}"]
        for key, ours in SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ends = [metadata[key] for key in keys if metadata.get(key, NO_TOKEN) != NO_TOKEN]
    vocabulary = vocabulary_of(metadata)
    # Of gpt-oss the format of its chats says what ends a turn.
    if vocabulary and metadata.get("general.architecture") != "gpt-oss":
        ends += [id for text, id in vocabulary.of(CONTROL) if text in TURN_ENDS]
    return data | {"eos_token_id": list(dict.fromkeys(ends))}


class GGUFFiles:
    """The `SmallFiles` that a GGUF file stands for.

    ``sampling``: what is recommended where the file recommends nothing.
    """

    def __init__(self, container: Container, sampling: Mapping[str, float]) -> None:
        self.container, self.sampling = container, sampling

    def path_of(self, name: str) -> Path:
        return self.container.path

    def json(self, name: str) -> dict[str, Any] | None:
        """What a JSON file would say. Raises TypeError or ValueError."""
        metadata = self.container.metadata
        match name:
            case "tokenizer.json":
                return tokenizer_data(metadata)
            case "tokenizer_config.json":
                return settings_data(metadata)
            case "generation_config.json":
                return {**self.sampling, **generation_data(metadata)}
        return None

    def text(self, name: str) -> str | None:
        """None: the chat template is in what tokenizer_config.json would say."""
        return None
