"""The server: the HTTP face of one `LLM`, for clients of OpenAI's interface and
Anthropic's. Needs the extra [serve].

A request's way: `RequestMiddleware` in `app.py` looks at what any request needs (its
id, the key, whether the server drains, the log) and turns whatever is raised into an
error of OpenAI's form. `Endpoint.respond` in `http/endpoint.py` reads the body, has it
checked and, where the endpoint answers with a `Generation`, runs its requests and
writes what it says of them: one JSON object, or server-sent events. The engine that
runs them is in another process, or there are several of them: `remote/`. On the
machines of a Ray cluster, `cluster/` has whole servers as replicas. OpenAI's interfaces
are in `openai/`, Anthropic's in `anthropic/`; `serve.py` runs the whole, and `start.py`
has what comes before anything heavy is imported.

To add an endpoint, write one file:

1. A `Body`, which is a pydantic model: its fields are what is taken. A subclass of
   `SampledBody` takes all of `SamplingParams` too, and `model`, `n`, `stream`, ... A
   field that is a `Body` is read likewise. What others have and we don't stands in its
   ``unsupported``, with the values that ask for nothing; a hint is ignored whatever its
   value. Its ``apply_aliases`` turns what clients write into what the fields take,
   unless the server is strict. All other names are ignored. The OpenAPI document and
   /docs are made from the same models. Another `Body` may declare the parameters behind
   the path's "?".
2. Its ``handler``, a function of the `Call`, which may run in a worker thread. It
   raises TypeError or ValueError for what cannot run (400; a `ParameterError` names its
   parameter) or `APIError` for other refusals. It returns a dict (JSON), a Starlette
   response, an awaitable of either, or a `Generation`.
3. A subclass of `Generation` if the model is asked: the checked requests (from
   ``call.service.llm.input_processor``), and what is said of their replies. ``first``,
   ``part`` and ``last`` give the events of a stream and ``whole`` the one object
   without; they are pure, and tests compare the two; what has effects belongs into
   ``begin`` and ``end``. An event with a "type" gets an ``event:`` line.
4. A list of `Endpoint` records, with a name of its own, added to ENDPOINTS in app.py.
   ``result`` is its answer's schema, from `http/response_schemas.py`; ``form`` is how
   errors look there, if not as OpenAI's; ``open`` says that it needs no key, and the
   first line of its handler's docstring is its summary at /docs. For batch files, add
   it to ENDPOINTS of apps/offline.py too; on a cluster, a field with a new name that
   holds the prompt belongs into PROMPT_PARTS of `cluster/ingress.py`.

It inherits the rest: limits, request ids, disconnects, slow readers, time limit, drain,
metrics and the access log.

The page at / is in page/, written by hand in JavaScript, without libraries. view.js
draws the engine there and in the course's widget; `http/live_view.py` sends it what to
draw.
"""
