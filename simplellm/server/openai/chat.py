"""/v1/chat/completions: the assistant's next turn in a conversation."""

from collections.abc import Sequence
from typing import Any

from simplellm.api.outputs import ChatChoice, Usage
from simplellm.base.config import expect
from simplellm.server.http.endpoint import Call, Endpoint, usage_fields
from simplellm.server.http.response_schemas import CHAT
from simplellm.server.openai.chat_body import ChatBody
from simplellm.server.openai.completions import Choices
from simplellm.server.openai.deltas import Turn, message_of_choice
from simplellm.server.openai.logprobs import chat_logprobs, prompt_logprobs
from simplellm.server.openai.tools import ClientTool, ClientTools, text_argument
from simplellm.text.harmony import Delta


def called_name(tool: ClientTool, shown: str) -> str:
    """The name of a tool in a chat, where a namespace is part of the name."""
    return tool.name if tool.namespace is None else shown


class ClientTurn:
    """One choice of a streamed chat: a `Turn` whose deltas fit the client's ``tools``.

    The input of a custom tool comes in one delta when the call is over: until then its
    text is JSON. In the ``older`` form a message has one "function_call".
    """

    def __init__(self, tools: ClientTools, *, older: bool) -> None:
        self.turn, self.tools, self.older = Turn(), tools, older
        self.custom: tuple[int, list[str]] | None = None  # the call that is under way

    def push(self, part: Delta) -> dict[str, Any]:
        """The delta that ``part`` adds to the message."""
        delta = self.turn.push(part)
        if "tool_calls" not in delta:
            return delta
        (call,) = delta["tool_calls"]
        ended = []
        if "id" in call:
            ended = self.close().get("tool_calls", [])
            tool = self.tools.called(part.recipient)
            call["function"]["name"] = called_name(tool, call["function"]["name"])
            if tool.kind == "custom":
                self.custom = part.call or 0, []
                custom = {"name": tool.name, "input": ""}
                begun = {"index": call["index"], "id": call["id"], "type": "custom"}
                call = begun | {"custom": custom}
        if self.older:
            return {"function_call": call["function"]}
        if self.custom is not None:
            self.custom[1].append(part.text)
            if "custom" not in call:
                return {}
        return {"tool_calls": [*ended, call]}

    def close(self) -> dict[str, Any]:
        """The delta that the end of a call adds to the message."""
        if self.custom is None:
            return {}
        (index, texts), self.custom = self.custom, None
        written = text_argument("".join(texts), "input")
        return {"tool_calls": [{"index": index, "custom": {"input": written}}]}


def client_message(
    choice: ChatChoice, tools: ClientTools, *, older: bool
) -> dict[str, Any]:
    """A whole turn as `message_of_choice` makes it, with the client's tool names."""
    message = message_of_choice(choice)
    calls = message.get("tool_calls", [])
    for call in calls:
        function = call["function"]
        tool = tools.called(function["name"])
        function["name"] = called_name(tool, function["name"])
        if tool.kind == "custom":
            written = text_argument(function["arguments"], "input")
            call |= {"type": "custom", "custom": {"name": tool.name, "input": written}}
            del call["function"]
    if older and calls:
        message["function_call"] = message.pop("tool_calls")[0]["function"]
    return message


class Chat(Choices):
    """The assistant's next turn in a conversation, in one or more choices."""

    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, call: Call) -> None:
        body: ChatBody = call.body
        input_processor = call.service.llm.input_processor
        params: dict[str, Any] = {"max_tokens": None, **body.sampling}
        if body.max_completion_tokens is not None:
            params["max_tokens"] = body.max_completion_tokens
        if body.logprobs or body.return_token_ids:  # parts have both or neither
            params["logprobs"] = body.top_logprobs
        params["prompt_logprobs"] = body.prompt_logprobs
        older = body.functions is not None
        functions = [{**one, "type": "function"} for one in body.functions or ()]
        tools = ClientTools(functions or body.tools or ())
        choice = body.function_call if older else body.tool_choice
        if older and isinstance(choice, dict):
            choice = {"type": "function", **choice}
        spec = input_processor.process_chat(
            [message.as_openai() for message in body.messages],
            tools=tools.functions,
            tool_choice=tools.choice(choice),
            parallel_tool_calls=body.parallel_tool_calls and not older,
            response_format=body.response_format,
            reasoning_effort=body.reasoning_effort,
            chat_template_kwargs=body.chat_template_kwargs,
            priority=body.priority,
            **params,
        )
        if body.continue_final_message:
            text = str(body.messages[-1].as_openai()["content"])
            closed, spec = spec, input_processor.reopened(spec, text)
            expected = "false: the chat template shows this answer in other words"
            if closed.grammar is not None:
                expected = "false beside a format or a required call"
            expect(spec is not closed, "continue_final_message", True, expected)
        super().__init__(call, [spec], "chatcmpl", chat=True)
        self.tokenizer = input_processor.need_tokenizer()
        self.tools, self.older = tools, older
        self.turns = [ClientTurn(tools, older=older) for _ in range(body.n)]

    def logprobs(self, part: Delta | ChatChoice) -> dict[str, Any] | None:
        """The log-probabilities of a part or a choice, if the body asks for them."""
        entries = part.logprobs if self.body.logprobs else None
        as_ids = self.body.return_tokens_as_token_ids
        return chat_logprobs(entries, self.tokenizer, as_ids=as_ids)

    def reason(self, end: ChatChoice) -> str | None:
        """The finish_reason, which the older form calls "function_call"."""
        calls = end.finish_reason == "tool_calls"
        return "function_call" if calls and self.older else end.finish_reason

    def delta(
        self,
        index: int,
        delta: dict[str, Any],
        part: Delta | None = None,
        end: ChatChoice | None = None,
    ) -> dict[str, Any]:
        """One event of a stream, made of one part of one choice, or of its end."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": end and self.reason(end),
            "stop_reason": end and end.stop_reason,  # as vLLM has it
        }
        if part is not None:
            choice["logprobs"] = self.logprobs(part)
            if self.body.return_token_ids:
                choice["token_ids"] = list(part.token_ids)
        return self.event([choice])

    def first(self) -> list[dict[str, Any]]:
        begin = {"role": "assistant", "content": ""}
        return [self.delta(index, begin) for index in range(self.n)]

    def part(self, index: int, part: Delta) -> list[dict[str, Any]]:
        delta = self.turns[index].push(part)
        visible = delta or part.token_ids
        return [self.delta(index, delta, part)] if visible else []

    def ended(self, index: int, output: ChatChoice) -> list[dict[str, Any]]:
        if output.finish_reason == "abort":  # the server ends, and the stream says so
            return []
        rest = self.turns[index].close()
        held = [self.delta(index, rest)] if rest else []
        return [*held, self.delta(index, {}, end=output)]

    def whole(self, outputs: Sequence[ChatChoice], usage: Usage) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            choice = {
                "index": index,
                "message": client_message(output, self.tools, older=self.older),
                "logprobs": self.logprobs(output),
                "finish_reason": self.reason(output),
                "stop_reason": output.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        body = self.object(choices)
        if self.body.return_token_ids:
            body["prompt_token_ids"] = self.specs[0].tokens
        if self.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs)
        return body | {"usage": usage_fields(usage)}


CHATS = [Endpoint("POST", "/v1/chat/completions", Chat, body=ChatBody, result=CHAT)]
