"""What every endpoint is made of.

`endpoint.py` has a request's way from its body to its answer. `bodies.py` reads bodies:
what is taken, mapped, refused and ignored. `errors.py` says what went wrong, `sse.py`
writes streams. `openapi.py` makes the OpenAPI document of the same models, with the
answers of `answers.py`. `facts.py` has the small endpoints, `metrics.py` what /metrics
tells and `live.py` what /live does.
"""
