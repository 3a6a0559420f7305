"""Two calls of a tool through one framework: `python frameworks.py NAME URL`.

It runs in an environment of its own, which has nothing of ours. Prints which products
the tool was asked for, and the answer, as JSON.
"""

import asyncio
import json
import sys
from typing import Any

QUESTION = "Multiply 47 by 85, then 12 by 34, by the tool."
MODEL, KEY = "tiny", "none"
asked: list[tuple[int, int]] = []


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: the first
        b: the second
    """
    asked.append((a, b))
    return a * b


def openai_agents(url: str, api: str = "responses") -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key=KEY)
    kinds: dict[str, Any] = {
        "responses": OpenAIResponsesModel,
        "chat": OpenAIChatCompletionsModel,
    }
    agent = Agent(
        name="Calculator",
        model=kinds[api](model=MODEL, openai_client=client),
        tools=[function_tool(multiply)],
    )

    async def streamed() -> str:
        found = Runner.run_streamed(agent, QUESTION)
        async for _ in found.stream_events():
            pass
        return str(found.final_output)

    return asyncio.run(streamed())


def openai_agents_chat(url: str) -> str:
    return openai_agents(url, "chat")


def langchain(url: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    bound = tool(multiply)
    model = ChatOpenAI(base_url=url, api_key=KEY, model=MODEL).bind_tools([bound])
    messages: list[Any] = [HumanMessage(QUESTION)]
    while True:
        answer = None
        for part in model.stream(messages):
            answer = part if answer is None else answer + part
        if not answer.tool_calls:
            return str(answer.text)
        messages.append(answer)
        for call in answer.tool_calls:
            result = bound.invoke(call["args"])
            messages.append(ToolMessage(str(result), tool_call_id=call["id"]))


def langgraph(url: str) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(base_url=url, api_key=KEY, model=MODEL, use_responses_api=True)
    graph = create_react_agent(model, [multiply])
    found = graph.invoke({"messages": [("user", QUESTION)]})
    return str(found["messages"][-1].text)


def pydantic_ai(url: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))
    return str(Agent(model, tools=[multiply]).run_sync(QUESTION).output)


def autogen(url: str) -> str:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    about = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": "unknown",
    }
    client = OpenAIChatCompletionClient(
        model=MODEL, base_url=url, api_key=KEY, model_info=about
    )
    agent = AssistantAgent(
        "calculator",
        client,
        tools=[multiply],
        max_tool_iterations=5,
        model_client_stream=True,
    )
    found = asyncio.run(agent.run(task=QUESTION))
    return str(found.messages[-1].content)


def agno(url: str) -> str:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id=MODEL, base_url=url, api_key=KEY)
    return str(
        Agent(model=model, tools=[multiply], telemetry=False).run(QUESTION).content
    )


def litellm(url: str) -> str:
    import litellm as client

    function = {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        found = client.completion(
            model=f"openai/{MODEL}",
            api_base=url,
            api_key=KEY,
            messages=messages,
            tools=[{"type": "function", "function": function}],
        )
        answer = found.choices[0].message
        if not answer.tool_calls:
            return str(answer.content)
        messages.append(answer)
        for call in answer.tool_calls:
            result = multiply(**json.loads(call.function.arguments))
            message = {"role": "tool", "tool_call_id": call.id}
            messages.append({**message, "content": str(result)})


if __name__ == "__main__":
    name, url = sys.argv[1:]
    text = globals()[name](url)
    print(json.dumps({"asked": asked, "text": text}))
