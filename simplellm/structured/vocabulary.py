"""A model's tokens as llguidance wants them."""

from simplellm.text.tokenizer import Tokenizer

# How much of a text that has to come becomes tokens at once. A pattern says 100,000
# letters in a few, and who waits for their tokens holds up all that the engine runs.
MOST_FORCED = 1000  # characters


class Vocabulary:
    """A tokenizer as llguidance wants it: every id's bytes, and a way to encode.

    llguidance panics if a text can't be encoded. So a text with a byte that no token
    spells is encoded up to that byte.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        self.tokenizer, self.eos_token_id = tokenizer, eos_token_id
        ids = range(vocab_size)
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        self.special_token_ids = [id for id in ids if tokenizer.is_special(id)]
        ordinary = tokenizer.tokens.items()
        self.bytes = {token[0]: id for id, token in ordinary if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text, which spell it to the byte.

        Some tokenizers change a text, and some put a space in front of it, though not
        after a line break. What they would change is spelled in bytes.
        """
        text = (text.decode() if isinstance(text, bytes) else text)[:MOST_FORCED]
        bytes_, ids = text.encode(), self.tokenizer.encode(text)
        if ids and not bytes_.startswith(self.tokens[ids[0]]):
            ids = self.tokenizer.encode("\n" + text)
            lines = [n for n, id in enumerate(ids, 1) if self.tokens[id] == b"\n"]
            ids = ids[lines[0] :] if lines else []
        prefix, start = list[int](), 0
        for id in ids:
            if not bytes_.startswith(self.tokens[id], start):
                break
            prefix.append(id)
            start += len(self.tokens[id])
        for byte in bytes_[start:]:
            if byte not in self.bytes:  # what no token spells fits no answer
                break
            prefix.append(self.bytes[byte])
        return prefix
