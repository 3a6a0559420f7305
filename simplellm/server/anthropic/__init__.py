"""Anthropic's interface: `messages.py` answers, `messages_body.py` reads what is asked,
and `messages_lenient.py` rewrites what clients send into that."""
