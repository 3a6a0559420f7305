"""Compiled grammars: which texts of tokens a request may become."""

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from simplellm.tokenizer import Tokenizer


class Vocabulary:
    """The bytes of all tokens, as llguidance reads a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos: Collection[int]) -> None:
        self.tokens = [tokenizer.token_bytes(id) for id in range(size)]
        ids = range(size)
        self.special_token_ids = [id for id in ids if id not in tokenizer.tokens]
        self.eos_token_id, self.bos_token_id = min(eos), None
        self.encode = tokenizer.encode

    def __call__(self, text: Any) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self.encode(text)


class Grammar:
    """A compiled grammar; ``matcher`` is at its beginning."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer, size: int, eos: tuple[int, ...]) -> Any:
    import llguidance

    wrapper = llguidance.TokenizerWrapper(Vocabulary(tokenizer, size, eos))
    return llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=[*eos])


def compile_grammar(
    text: str, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> Grammar:
    """Raises ValueError with llguidance's reason."""
    import llguidance

    known = _vocabulary(tokenizer, vocab_size, tuple(sorted(eos_token_ids)))
    matcher = llguidance.LLMatcher(known, text, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error().partition("\n")[0])
    return Grammar(matcher)
