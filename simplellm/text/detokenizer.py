"""Token ids to text, while they arrive."""

import codecs
from collections.abc import Iterable
from functools import partial

from simplellm.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes one token at a time and only ever returns complete characters.

    A character's UTF-8 bytes may be spread over several tokens: `push` returns "" until
    the last of them is there. Bytes that can no longer become a character turn into
    U+FFFD. What `push` and `flush` return adds up to `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._bytes = partial(tokenizer.token_bytes, skip_special=skip_special)
        self._pending = b""  # up to three bytes of a character

    def flush(self) -> str:
        """End the text: U+FFFD for a character whose last bytes never came, or ""."""
        pending, self._pending = self._pending, b""
        return pending.decode(errors="replace")

    def push(self, id: int) -> str:
        """The characters that token ``id`` completes."""
        return self.push_bytes(self._bytes(id))

    def push_all(self, ids: Iterable[int]) -> str:
        """What `push` returns for one after the other of ``ids``, joined."""
        return self.push_bytes(b"".join(map(self._bytes, ids)))

    def push_bytes(self, data: bytes) -> str:
        """The characters that ``data`` completes."""
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace")
        self._pending = data[used:]
        return text
