"""OpenAI's interfaces: completions, chats and responses.

`completions.py` and `chat.py` are an endpoint each. A chat's body is in `chat_body.py`,
its messages in `chat_messages.py`; `deltas.py` has the parts of a turn in a stream,
`logprobs.py` log-probabilities in both forms. `tools.py` makes functions of tools.
`responses.py` is the third: `responses_body.py` what may be asked for,
`responses_items.py` the conversation, `responses_output.py` what comes back,
`responses_store.py` responses that are kept.
"""
