"""Random tokens that a model may write, whatever they mean.

They are drawn from a vocabulary of harmony's own words and markers, of bytes that are
half a character, of ids that no tokenizer has, and of ordinary tokens.
"""

import random
from functools import cache

from models import CONFIG, TOKENIZER

from simplellm import LLM

MOST = 60  # tokens of an answer
WORDS = "assistant user tool system analysis commentary final json functions add"
WORDS += ' to=functions.add to=nobody {"a": 1} { } . = : < | > \n <|end|> 😀 é'


@cache
def vocabulary(seed: int) -> list[int]:
    """Some tokens; each kind is as likely as another."""
    chance = random.Random(seed)
    markers = [id for name, id in TOKENIZER.special.items()]
    ends = {TOKENIZER.special[name] for name in ("<|return|>", "<|call|>")}
    kinds: list[list[int]] = [
        [id for id in markers if id not in ends],
        [id for word in WORDS.split() for id in TOKENIZER.encode(f" {word}")],
        [id for word in WORDS.split() for id in TOKENIZER.encode(word)],
        TOKENIZER.encode("😀é€\U0010ffff"),
        list(range(128, 256)),
        list(range(TOKENIZER.vocab_size, CONFIG.vocab_size)),
        list(range(TOKENIZER.vocab_size)),
    ]
    found = [chance.choice(chance.choice(kinds)) for _ in range(200)]
    return found + [*ends] * chance.choice((0, 1, 4))


def babble(seed: int, position: int) -> int:
    """The token that the model writes; a hundred seeds share a vocabulary."""
    words = vocabulary(seed // 100)
    return random.Random(f"{seed} {position}").choice(words)


def expected(seed: int, llm: LLM) -> list[int]:
    """The tokens that the model writes with this seed."""
    found = []
    for position in range(MOST):
        found.append(babble(seed, position))
        if found[-1] in llm.eos_token_ids:
            break
    return found
