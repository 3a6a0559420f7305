"""Errors of requests, in HTTP and in the forms that clients expect."""

import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from simplellm.api.checks import ContextLengthError
from simplellm.base.request import EngineError, QueueFullError
from simplellm.engine.engine_client import RequestGrammarError

# JSON can go wrong in many ways. A body that has got past the checks is still to blame
# for what it then breaks, but that is worth a line in the log.
UNMEANT = (LookupError, AttributeError, RecursionError)
REFUSALS = (TypeError, ValueError, *UNMEANT)
TOO_LONG = "context_length_exceeded"  # OpenAI's code, at which agents compact
RETRY = {"retry-after": "1"}  # seconds; a place in the queue is free again soon


class APIError(Exception):
    """A request that ends with an HTTP ``status`` other than 200.

    ``param`` is the parameter at fault, ``code`` a word for programs; ``details`` are
    further fields of Anthropic's form.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code = param, code
        self.headers = dict(headers or {})
        self.details = details

    @property
    def type(self) -> str:
        """OpenAI's word for errors like this one."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


# Makes the body of an error.
ErrorForm = Callable[[APIError], dict[str, Any]]


def openai_form(error: APIError) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    fields = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return {"error": fields}


# Anthropic's words for errors; of others the kind of status decides.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_form(error: APIError) -> dict[str, Any]:
    """The body of an error in Anthropic's form, which streams use too."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(error.status, kind)
    fields: dict[str, Any] = {"type": kind, "message": error.message}
    if error.details is not None:
        fields["details"] = error.details
    return {"type": "error", "error": fields}


def unavailable(message: str, code: str) -> APIError:
    """An error 503: this engine or server can't answer now; another one may."""
    return APIError(503, message, code=code, headers=RETRY)


def param_of(error: Exception, params: Container[str]) -> str | None:
    """The parameter among ``params`` that an error's message names, if it does.

    A path such as "messages[0].role" stays whole. Python's name "prompts" is a prompt
    in a body; where there is none, it is the messages or the input.
    """
    param = getattr(error, "param", "")
    names = [param, param.removesuffix("s")]
    names += ["messages", "input"] if param == "prompt" else []
    return next((n for n in names if re.split(r"[.\[]", n)[0] in params), None)


def as_api_error(error: Exception, params: Container[str] = ()) -> APIError | None:
    """The APIError for a client; None for an ``error`` that nobody foresaw."""
    match error:
        case APIError():
            return error
        case ContextLengthError():
            param = param_of(error, params)
            return APIError(400, str(error), param=param, code=TOO_LONG)
        case QueueFullError():
            return APIError(429, str(error), code="queue_full", headers=RETRY)
        case RequestGrammarError():
            expected = "simpler or looser structured_outputs, response format or tools"
            return APIError(400, f"{error}; expected {expected}", code="grammar_error")
        case EngineError():
            return unavailable(str(error), "engine_error")
        case TimeoutError():
            message = "the time limit for requests is over; expected a shorter answer"
            return APIError(504, message, code="timeout")
    if isinstance(error, REFUSALS):
        message = str(error) or repr(error)
        return APIError(400, message, param=param_of(error, params))
    return None
