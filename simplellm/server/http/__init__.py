"""What every endpoint is made of.

`endpoint.py` has a request's way from its body to its answer. `bodies.py` reads bodies:
what is taken, mapped, refused and ignored. `errors.py` says what went wrong, `sse.py`
writes streams. `openapi.py` makes the OpenAPI document of the same models, with the
answers of `response_schemas.py`. `small_endpoints.py` has models, tokens and health,
`metrics.py` has /metrics and `live_view.py` has /live.
"""
