"""Which tokens may come next, and their log-probabilities.

`filters.py` is top_k, top_p and min_p, `penalties.py` those on repeated tokens,
`allowed_tokens.py` which tokens a request may get and `masks.py` these on the device,
`logprobs.py` log-probabilities.
"""
