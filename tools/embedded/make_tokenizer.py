"""Trains the embedded model's byte-level BPE and writes its tokenizer.json.

    python tools/embedded/make_tokenizer.py simplellm/embedded/tokenizer.json

All but the vocabulary is in empty_tokenizer.json beside this file: text splits into
letters with one leading space, single digits, punctuation and white space. Digits stand
alone so that a sum can be worked place by place.

Ids are ranks, as in o200k: the 256 bytes, then the merges in order, then harmony's
special tokens. Every split of a token into two others is listed as a merge and
`ignore_merges` is set, so that tiktoken (which knows only ranks) and Hugging Face's
tokenizers give the same ids.
"""

import json
import sys
from pathlib import Path

from corpus import sample_texts
from problems import FOLDER, GLOSSARY
from tokenizers import Tokenizer, pre_tokenizers, trainers

EMPTY = FOLDER / "empty_tokenizer.json"
VOCABULARY = 1040


def train(texts: list[str]) -> list[str]:
    """The tokens in order of rank, in byte-level spelling."""
    plain = json.loads(EMPTY.read_text(encoding="utf-8")) | {"added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=14,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def all_merges(ranks: dict[str, int]) -> list[list[str]]:
    """Every way to make a token from two others, in the order of the result."""
    merges = []
    for token in ranks:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [[a, b] for a, b in splits if a in ranks and b in ranks]
    return sorted(merges, key=lambda pair: ranks[pair[0] + pair[1]])


def main() -> None:
    target = Path(sys.argv[1])
    texts = list(sample_texts(40_000, seed=1)) + list(GLOSSARY) * 200
    ranks = {token: rank for rank, token in enumerate(train(texts))}
    data = json.loads(EMPTY.read_text(encoding="utf-8"))
    data["model"] |= {"vocab": ranks, "merges": all_merges(ranks)}
    target.write_text(json.dumps(data, ensure_ascii=False, indent=0), encoding="utf-8")
    reloaded = Tokenizer.from_file(str(target))
    sample = "".join(texts[:200])
    count = len(reloaded.encode(sample).ids)
    print(
        f"{reloaded.get_vocab_size()} tokens; {len(sample) / count:.2f} characters each"
    )


if __name__ == "__main__":
    main()
