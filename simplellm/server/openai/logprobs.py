"""Log-probabilities in the two forms that OpenAI has, for chats and for completions."""

import codecs
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from simplellm.base.request import TokenLogprobs
from simplellm.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON can't spell


def id_name(token: int) -> str:
    """A token as vLLM writes it where return_tokens_as_token_ids asks for ids."""
    return f"token_id:{token}"


def chat_logprobs(
    entries: Sequence[TokenLogprobs] | None,
    tokenizer: Tokenizer,
    *,
    as_ids: bool = False,
) -> dict[str, Any] | None:
    """The logprobs of a chat: of all tokens, also of control tokens and reasoning."""
    if entries is None:
        return None

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token)
        return {
            "token": id_name(token) if as_ids else spelled.decode(errors="replace"),
            "logprob": max(logprob, LEAST),
            "bytes": list(spelled),
        }

    content = [
        one(entry.token_id, entry.logprob)
        | {"top_logprobs": [one(*pair) for pair in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def token_name(token: int, tokenizer: Tokenizer) -> str:
    """A token as completions write it: its text, or its bytes if they are no text."""
    spelled = tokenizer.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None] | None,
) -> list[dict[str, Any] | None]:
    """The logprobs of a prompt by token id, as in vLLM; the first token has None."""

    def one(entry: TokenLogprobs) -> dict[str, Any]:
        pairs = zip(entry.top, entry.decoded_top, strict=True)
        rows = [
            (token, value, rank, text)
            for rank, ((token, value), text) in enumerate(pairs, start=1)
        ]
        own = entry.token_id, entry.logprob, entry.rank, entry.decoded_token
        return {
            str(token): {
                "logprob": max(value, LEAST),
                "rank": rank,
                "decoded_token": text,
            }
            for token, value, rank, text in [own, *rows]
        }

    return [None if entry is None else one(entry) for entry in entries or ()]


class LegacyLogprobs:
    """The log-probabilities of one sample of a completion, part by part.

    A token's text_offset is where its text begins in the text of the answer, in
    characters. A token that only completes a character has the offset of that
    character.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, as_ids: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        by_text = partial(token_name, tokenizer=tokenizer)
        self.name: Callable[[int], str] = id_name if as_ids else by_text
        self.skip_special = skip_special  # whether control tokens are no text
        self.offset = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(
        self,
        tokens: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        *,
        prompt: bool = False,
    ) -> dict[str, list[Any]]:
        """Add tokens and their log-probabilities; a prompt's first has None.

        In a ``prompt`` control tokens are part of the text.
        """
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for token, entry in zip(tokens, entries, strict=True):
            logprob, named = None, None
            if entry is not None:
                logprob = max(entry.logprob, LEAST)
                pairs = [*entry.top, (token, logprob)]
                named = {self.name(t): max(p, LEAST) for t, p in pairs}
            columns["tokens"].append(self.name(token))
            columns["token_logprobs"].append(logprob)
            columns["top_logprobs"].append(named)
            columns["text_offset"].append(self.offset)
            skip = self.skip_special and not prompt
            spelled = self.tokenizer.token_bytes(token, skip_special=skip)
            self.offset += len(self.decoder.decode(spelled))
        return columns
