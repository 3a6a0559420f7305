"""OpenAI's interfaces: completions, chats and responses.

`completions.py` and `chat.py` are an endpoint each; `deltas.py` has the parts of a turn
in a chat's stream, `chat_calls.py` its calls as the client knows them, `chat_schema.py`
what a chat may hold, `logprobs.py`
log-probabilities in both forms. `tools.py` makes functions of tools, and
`chat_lenient.py` rewrites what clients send. `responses.py`
is the third: `responses_body.py` what may be asked for, `responses_items.py` the
conversation, `responses_output.py` what comes back, `responses_store.py` responses that
are kept.
"""
