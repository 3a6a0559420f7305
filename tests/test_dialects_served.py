"""Chats of another family through the LLM and the server: every way gives the same.

The model is a small random one, whose tokens are decided by the test; its tokenizer and
its template are Qwen3's in small.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families_text import write_text_side
from models import SMALL, saying, write_model
from serving import Served, serving
from test_dialects import CALL, QWEN_PARTS, QWEN_TURN, USER, WEATHER

from simplellm import LLM
from simplellm.api.input_processor import InputProcessor
from simplellm.api.load import load
from simplellm.api.outputs import is_reasoning
from simplellm.text.dialects.dialect import HARMONY

REASONING, CONTENT, MADE = QWEN_PARTS
ASKED: dict[str, Any] = {"messages": [USER], "tools": [WEATHER], "max_tokens": 300}
LARGE = {"num_pages": 400, "max_num_batched_tokens": 256}
PARAMETERS = WEATHER["function"]["parameters"]


def family_llm(folder: Path, kind: str) -> LLM:
    """A random model with the text side of another family."""
    loaded = load(folder, replace(SMALL, **LARGE))
    config = replace(loaded.input_processor.config, model_type="qwen3")
    input_processor = InputProcessor.open(write_text_side(folder, kind), config)
    input_processor = replace(
        input_processor, max_model_len=loaded.input_processor.max_model_len
    )
    return LLM.of(replace(loaded, input_processor=input_processor))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with family_llm(folder, "qwen") as llm, serving(llm) as found:
        yield found


@pytest.fixture
def llm(served: Served) -> Iterator[LLM]:
    """It writes `QWEN_TURN`."""
    with saying(served.service.llm, QWEN_TURN):
        yield served.service.llm


def test_what_ends_a_turn_and_begins_a_text(served: Served) -> None:
    llm = served.service.llm
    assert llm.tokenizer.special["<|im_end|>"] in llm.eos_token_ids
    ids = llm.tokenizer.encode("Hi")
    answer = served.post("/tokenize", {"prompt": "Hi"}).json()
    assert answer["tokens"] == [*llm.input_processor.dialect.begin, *ids]


def test_what_begins_a_text_comes_once(tmp_path: Path) -> None:
    """Also in front of a chat that a template has written; or not at all."""
    with family_llm(write_model(tmp_path / "tiny"), "llama") as llm:
        tokenizer, processor = llm.tokenizer, llm.input_processor
        (first,) = processor.dialect.begin
        chat = processor.process_chat([USER]).tokens
        text = tokenizer.decode(chat)
        assert chat[0] == first
        assert processor.process(text, None, {"parse_special": True}).tokens == chat
        assert processor.encode("Hi")[0] == first
        options = {"add_special_tokens": False}
        ids = processor.process("Hi", None, options).tokens
        assert ids == tokenizer.encode("Hi")
        (found,) = llm.generate(chat, max_tokens=1, parse_special=True)
        assert found.prompt_token_ids == chat


def test_a_turn_in_python(llm: LLM) -> None:
    found = llm.chat(**ASKED, logprobs=0)
    assert (found.reasoning, found.content, found.tool_calls) == QWEN_PARTS
    assert found.finish_reason == "tool_calls"
    assert 0 < found.usage.reasoning_tokens < found.usage.completion_tokens
    stream = llm.stream_chat(**ASKED, logprobs=0)
    parts = list(stream)
    assert "".join(p.text for p in parts if is_reasoning(p)) == REASONING
    ids = [id for part in parts for id in part.token_ids]
    assert ids == found.token_ids == stream.output().token_ids
    # And on, with what the calls gave.
    results = [
        {"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n}!"}
        for n in range(2)
    ]
    messages = [USER, found.choices[0].message(), *results]
    asked = llm.input_processor.process_chat(messages, tools=[WEATHER])
    prompt = llm.tokenizer.decode(asked.tokens)
    assert f"<think>\n{REASONING}\n</think>\n\n{CONTENT}" in prompt
    assert "<tool_response>\n0!\n</tool_response>\n<tool_response>\n1!" in prompt


def test_a_template_looks_at_what_it_is_told(served: Served, llm: LLM) -> None:
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    asked = llm.input_processor.process_chat([USER], **options)
    assert llm.tokenizer.decode(asked.tokens).endswith("<think>\n\n</think>\n\n")
    answer = served.post("/v1/chat/completions", {"messages": [USER], **options})
    assert answer.json()["usage"]["prompt_tokens"] == len(asked.tokens)
    unseen: list[dict[str, Any]] = [{"messages": []}, {"x": "<|im_end|>"}]
    for odd in unseen:  # change nothing
        same = llm.input_processor.process_chat([USER], chat_template_kwargs=odd)
        assert same.tokens == llm.input_processor.process_chat([USER]).tokens
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        replace(llm.input_processor, dialect=HARMONY).process_chat([USER], **options)
    with pytest.raises(TypeError, match="chat_template_kwargs"):
        llm.input_processor.process_chat([USER], chat_template_kwargs=5)


def test_stop_strings_count_in_the_answer_only(llm: LLM) -> None:
    found = llm.chat(**ASKED, stop=["o"])
    assert (found.reasoning, found.content) == (REASONING, "I'll l")
    assert found.finish_reason == "stop" and found.stop_reason == "o"


def test_chat_completions(served: Served, llm: LLM) -> None:
    path = "/v1/chat/completions"
    choice = served.post(path, ASKED).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning"], message["content"]) == (REASONING, CONTENT)
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [{"name": c.name, "arguments": c.arguments} for c in MADE]
    texts: dict[Any, str] = {}
    for event in served.events(path, ASKED):
        delta = event["choices"][0]["delta"]
        for name in ("reasoning", "content"):
            texts[name] = texts.get(name, "") + (delta.get(name) or "")
        for call in delta.get("tool_calls", ()):
            number, added = call["index"], call["function"]["arguments"]
            texts[number] = texts.get(number, "") + added
    arguments = {number: call.arguments for number, call in enumerate(MADE)}
    assert texts == {"reasoning": REASONING, "content": CONTENT, **arguments}


@pytest.mark.parametrize("text", ["The sum is", "The sum is: \n"])
def test_an_answer_that_is_begun(served: Served, text: str) -> None:
    """The model goes on with it, and the white space between is its own."""
    begun = {"role": "assistant", "content": text}
    asked: dict[str, Any] = {"messages": [USER, begun], "max_tokens": 9}
    chat = asked | {"continue_final_message": True, "return_token_ids": True}
    with saying(served.service.llm, "\n\n 132<|im_end|>"):
        found = served.post("/v1/chat/completions", chat).json()
        blocks = served.post("/v1/messages", asked).json()["content"]
    assert found["choices"][0]["message"]["content"] == "\n\n 132"
    assert [block["text"] for block in blocks] == ["\n\n 132"]
    prompt = served.service.llm.tokenizer.decode(found["prompt_token_ids"])
    assert prompt.rstrip().endswith(text.rstrip())


def test_responses_and_messages(served: Served, llm: LLM) -> None:
    flat = {"type": "function", **WEATHER["function"]}
    body = {"input": USER["content"], "instructions": "Be brief.", "tools": [flat]}
    items = served.post("/v1/responses", body).json()["output"]
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in items] == kinds
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    body = {"messages": [USER], "system": "Be brief.", "tools": [tool]}
    path = "/v1/messages"
    blocks = served.post(path, {**body, "max_tokens": 300}).json()["content"]
    assert [b["type"] for b in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[2]["input"] == json.loads(MADE[0].arguments)
    # All are shown the same, as the template writes it.
    asked = served.post(f"{path}/count_tokens", body).json()["input_tokens"]
    system = {"role": "system", "content": "Be brief."}
    function = {"name": "get_weather", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": function}]
    chat = {"messages": [system, USER], "tools": tools}
    assert served.post("/tokenize", chat).json()["count"] == asked


def test_a_text_that_has_to_fit(served: Served, llm: LLM) -> None:
    """Behind free thoughts, or at once; so do the arguments of strict tools."""
    pytest.importorskip("llguidance")
    schema = {"name": "a", "schema": PARAMETERS, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    asked = llm.input_processor.process_chat([USER], response_format=form)
    thinking = "<think>\nHm.\n</think>\n\n"
    assert accepts(llm, asked, thinking + '{"city": "Rome"}')
    assert accepts(llm, asked, '{"city": "Rome"}')
    assert not accepts(llm, asked, thinking + '{"city": 5}')
    assert not accepts(llm, asked, "Rome")
    function = {**WEATHER["function"], "strict": True}
    tools = [{"type": "function", "function": function}]
    asked = llm.input_processor.process_chat(
        [USER], tools=tools, tool_choice="required"
    )
    start, end = '<tool_call>\n{"name": "get_weather", "arguments": ', "}\n</tool_call>"
    assert accepts(llm, asked, f'{start}{{"city": "Rome"}}{end}')
    assert not accepts(llm, asked, f'{start}{{"city": "Pisa"}}{end}')
    assert not accepts(llm, asked, "Rome")


def accepts(llm: LLM, asked: Any, text: str) -> bool:
    """Whether a turn may be this text, and end behind it."""
    assert asked.grammar is not None
    ids = llm.tokenizer.encode(text, special=True)
    matcher = asked.grammar.matcher.deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_errors_name_the_messages(served: Served) -> None:
    """What a template cannot write is the client's mistake, not the server's."""
    path, call = "/v1/chat/completions", {"role": "assistant", "tool_calls": [CALL]}
    tool = {"role": "tool", "tool_call_id": "other", "content": ""}
    with serving(served.service.llm, strict=True) as strict:
        answer = strict.post(path, {"messages": [USER | {"content": 5}]})
        assert answer.status_code == 400
        answer = strict.post(path, {"messages": [USER, call, tool]})
    assert answer.status_code == 400 and "tool_call_id" in answer.text
