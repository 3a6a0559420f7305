"""Anthropic's interface: `messages.py` answers, `messages_body.py` reads what is asked,
`blocks.py` has the kinds of blocks and tools,
and `messages_lenient.py` rewrites what clients send into that."""
