"""What every endpoint is made of.

`endpoint.py` has a request's way from its body to its answer. `bodies.py` reads bodies,
`lenient.py` rewrites what clients send into what that takes, `errors.py` says what went
wrong, `sse.py` writes streams. `openapi.py` makes the OpenAPI document, with the
answers of `answers.py`. `facts.py` has the small endpoints, `metrics.py` what /metrics
tells and `live.py` what /live does.
"""
