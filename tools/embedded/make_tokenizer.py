"""Trains the embedded model's byte-level BPE and writes its tokenizer.json.

    python tools/embedded/make_tokenizer.py simplellm/embedded/tokenizer.json

Ids are ranks, as in o200k: the 256 bytes, then the merges in order, then harmony's
special tokens. Every split of a token into two others is listed as a merge and
`ignore_merges` is set, so that tiktoken (which knows only ranks) and Hugging Face's
tokenizers give the same ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from corpus import sample_texts
from problems import GLOSSARY
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

VOCABULARY = 1040
# Letters with one leading space, single digits, punctuation, white space. Digits
# stand alone so that a sum can be worked place by place.
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]|\s+(?!\S)|\s+"
SPECIAL = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|reserved_2|>",
    "<|reserved_3|>",
    "<|return|>",
    "<|constrain|>",
    "<|reserved_6|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|reserved_11|>",
    "<|call|>",
)


def train(texts: list[str]) -> list[str]:
    """The tokens in order of rank, in byte-level spelling."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitting()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=alphabet,
        max_token_length=14,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def splitting() -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def all_merges(ranks: dict[str, int]) -> list[list[str]]:
    """Every way to make a token from two others, in the order of the result."""
    merges = []
    for token in ranks:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [[a, b] for a, b in splits if a in ranks and b in ranks]
    return sorted(merges, key=lambda pair: ranks[pair[0] + pair[1]])


def tokenizer_json(tokens: list[str]) -> dict:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {"id": len(tokens) + i, "content": name, **flags}
        | {"normalized": False, "special": True}
        for i, name in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                byte_level | {"trim_offsets": True},
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"trim_offsets": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": ranks,
            "merges": all_merges(ranks),
        },
    }


def main() -> None:
    target = Path(sys.argv[1])
    texts = list(sample_texts(40_000, seed=1)) + list(GLOSSARY) * 200
    tokens = train(texts)
    data = tokenizer_json(tokens)
    target.write_text(json.dumps(data, ensure_ascii=False, indent=0), encoding="utf-8")
    reloaded = Tokenizer.from_file(str(target))
    sample = "".join(texts[:200])
    count = len(reloaded.encode(sample).ids)
    print(
        f"{reloaded.get_vocab_size()} tokens; {len(sample) / count:.2f} characters each"
    )


if __name__ == "__main__":
    main()
