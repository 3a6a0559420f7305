"""The small endpoints: models, tokens, health and metrics."""

from datetime import UTC, datetime
from typing import Any, Self

from pydantic import model_validator
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from simplellm.base.config import expect
from simplellm.base.request import EngineError
from simplellm.server.http.bodies import Body, Effort, Several
from simplellm.server.http.endpoint import Call, Endpoint
from simplellm.server.http.response_schemas import (
    HEALTH,
    MODEL,
    MODEL_LIST,
    PROMPT,
    TOKEN_LIST,
)
from simplellm.server.openai.chat_messages import ChatMessage, Tools

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def model_card(call: Call, name: str) -> dict[str, Any]:
    """A served model as the lists of OpenAI, Anthropic and vLLM have it."""
    created = call.service.created
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "owned_by": "simplellm",
        "root": call.service.options.names[0],
        "max_model_len": call.service.llm.input_processor.max_model_len,
    }


def list_models(call: Call) -> dict[str, Any]:
    """The names that the model goes by."""
    cards = [model_card(call, name) for name in call.service.options.names]
    return {"object": "list", "data": cards, "has_more": False}


def get_model(call: Call) -> dict[str, Any]:
    """The model by one of its names."""
    name = call.request.path_params["model"]
    return model_card(call, call.service.check_model(name))


class TokenizeBody(Body):
    """What /tokenize takes: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Several[ChatMessage] | None = None
    tools: Tools | None = None
    reasoning_effort: Effort | None = None
    return_token_strs: bool = False
    add_special_tokens: bool = True
    parse_special: bool | None = None

    @property
    def compiles(self) -> bool:
        """Whether a grammar may have to be compiled: that of strict tools."""
        return bool(self.tools)

    @model_validator(mode="after")
    def check(self) -> Self:
        given = [self.prompt, self.messages].count(None)
        expect(given == 1, "prompt", self.prompt, "either prompt or messages")
        alone = self.prompt is None or self.tools is None
        expect(alone, "tools", self.tools, "none beside a prompt")
        return self


def tokenize(call: Call) -> dict[str, Any]:
    """The token ids of a prompt, or of a chat as the model gets it."""
    body: TokenizeBody = call.body
    input_processor = call.service.llm.input_processor
    tokenizer = input_processor.need_tokenizer()
    if body.prompt is not None:
        ids = input_processor.encode(
            body.prompt, body.parse_special, body.add_special_tokens
        )
    else:
        spec = input_processor.process_chat(
            [message.as_openai() for message in body.messages or ()],
            tools=body.tools,
            reasoning_effort=body.reasoning_effort,
        )
        ids = spec.tokens
    answer = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": input_processor.max_model_len,
    }
    if body.return_token_strs:
        answer["token_strs"] = [
            tokenizer.token_bytes(id).decode(errors="replace") for id in ids
        ]
    return answer


class DetokenizeBody(Body):
    """What /detokenize takes."""

    model: str | None = None
    tokens: Several[int]


def detokenize(call: Call) -> dict[str, Any]:
    """The text of token ids; control tokens by their names."""
    body: DetokenizeBody = call.body
    input_processor = call.service.llm.input_processor
    most = input_processor.config.vocab_size - 1
    for token in body.tokens:
        ok = 0 <= token <= most
        expected = f"a token id, 0 to {most}"
        expect(ok, "an entry of tokens", token, expected, param="tokens")
    return {"prompt": input_processor.need_tokenizer().decode(body.tokens)}


def health(call: Call) -> dict[str, Any]:
    """Whether the server answers: 503 if it can't, or soon won't."""
    call.service.check()
    engine = call.service.engine
    try:
        engine.check()
    except EngineError:
        call.service.check()
        raise
    return {"status": "ok"} | engine.health()


async def metrics(call: Call) -> Response:
    """Counts and times, for Prometheus."""
    text = await run_in_threadpool(call.service.metrics.text)
    return Response(text, headers={"content-type": PROMETHEUS})


SMALL_ENDPOINTS = [
    Endpoint("GET", "/v1/models", list_models, result=MODEL_LIST),
    Endpoint("GET", "/v1/models/{model:path}", get_model, result=MODEL),
    Endpoint("POST", "/tokenize", tokenize, result=TOKEN_LIST, body=TokenizeBody),
    Endpoint("POST", "/detokenize", detokenize, result=PROMPT, body=DetokenizeBody),
    Endpoint("GET", "/health", health, result=HEALTH, open=True),
    Endpoint("GET", "/metrics", metrics, open=True, media="text/plain"),
]
