"""Text: tokens, the formats of chats, and what reads a model's turn.

`tokenizer.py` turns text into token ids and back, `detokenizer.py` token ids into text
while they arrive. `harmony/` is the chat format of gpt-oss, `dialects/` those of other
models with their tokenizers and templates. `parser.py` says what a parser of turns has
to have in either.
"""
