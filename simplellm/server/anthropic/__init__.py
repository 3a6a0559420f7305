"""Anthropic's interface: `messages.py` answers, `messages_body.py` reads what is asked,
with the messages of `blocks.py`."""
