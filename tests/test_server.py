"""The server over HTTP: what it answers, and how it refuses."""

import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from models import HELLO, SMALL, TOKENIZER, until
from prometheus_client.parser import text_string_to_metric_families as parse_metrics
from serving import NAME, STEP, Served, babbling, events_of, said, serving, slow

from simplellm import LLM, QueueFullError
from simplellm.server.app import ENDPOINTS
from simplellm.server.http.bodies import Body
from simplellm.server.http.endpoint import MAX_BODY, Call, Endpoint, Generation
from simplellm.server.http.metrics import ServerMetrics, join_texts

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ANSWER += "<|channel|>final<|message|>132<|return|>"
CALL = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
CALL += '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
CALL += "<|call|>"
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


def test_a_completion(served: Served) -> None:
    with said(served, [65, 66, 67, 200]):
        answer = served.post(COMPLETE, {"prompt": "x", "max_tokens": 3, "model": NAME})
    found = answer.json()
    assert answer.status_code == 200
    assert found["object"] == "text_completion" and found["model"] == NAME
    (choice,) = found["choices"]
    text = TOKENIZER.decode([65, 66, 67])
    assert choice == {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert found["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


class Counted(Generation):
    """Tokens behind a fixed prompt, as a stream."""

    def __init__(self, call: Call) -> None:
        process = call.service.llm.input_processor.process
        specs = [process([1, 2], None, {"max_tokens": call.body.max_tokens})]
        super().__init__(specs, chat=False, stream=True)

    def part(self, index: int, part: Any) -> list[dict[str, Any]]:
        return [{"count": len(part.token_ids)}]

    def last(self, outputs: Any, usage: Any) -> list[dict[str, Any]]:
        return [{"whole": usage.completion_tokens}]


class CountedBody(Body):
    max_tokens: int


def test_an_endpoint_needs_a_body_a_generation_and_a_record(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Endpoint("POST", "/v1/counted", Counted, body=CountedBody)
    monkeypatch.setattr("simplellm.server.app.ENDPOINTS", [*ENDPOINTS, mine])
    with serving(served.service.llm) as other, said(other, [65, 66, 67, 200]):
        answer = other.post("/v1/counted", {"max_tokens": 3})
    *parts, last = events_of(answer.text)
    assert sum(part["count"] for part in parts) == last["whole"] == 3


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("x", 1), (["x", "yz"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)],
)
def test_prompts_and_samples(served: Served, prompt: Any, count: int) -> None:
    body = {"prompt": prompt, "n": 3, "max_tokens": 2, "echo": True, "seed": 5}
    found = served.post(COMPLETE, body).json()
    indices = [choice["index"] for choice in found["choices"]]
    assert indices == list(range(3 * count))
    every = [prompt] if count == 1 else prompt
    shown = [p if isinstance(p, str) else TOKENIZER.decode(p) for p in every]
    for choice in found["choices"]:
        assert choice["text"].startswith(shown[choice["index"] // 3])
    texts = [choice["text"] for choice in found["choices"]]
    pieces = [""] * len(texts)
    for event in served.events(COMPLETE, body):
        for choice in event["choices"]:
            pieces[choice["index"]] += choice["text"]
    assert pieces == texts


def test_sixteen_tokens_are_the_default(served: Served) -> None:
    found = served.post(COMPLETE, {"prompt": "x", "ignore_eos": True}).json()
    assert found["usage"]["completion_tokens"] == 16


def test_logprobs_of_a_completion(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 5, "logprobs": 2, "ignore_eos": True}
    found = served.post(COMPLETE, body | {"seed": 3, "return_token_ids": True}).json()
    (choice,) = found["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {5}
    for token, logprob, top in zip(
        logprobs["tokens"],
        logprobs["token_logprobs"],
        logprobs["top_logprobs"],
        strict=True,
    ):
        assert top[token] == logprob < 0
        assert 2 <= len(top) <= 3
    joined: dict[str, list[Any]] = {name: [] for name in logprobs}
    for event in served.events(COMPLETE, body | {"seed": 3}):
        for name, values in event["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == logprobs
    body |= {"return_tokens_as_token_ids": True, "seed": 3}
    (named,) = served.post(COMPLETE, body).json()["choices"]
    names = [f"token_id:{id}" for id in choice["token_ids"]]
    assert named["logprobs"]["tokens"] == names
    assert all(
        name in top and all(other.startswith("token_id:") for other in top)
        for name, top in zip(names, named["logprobs"]["top_logprobs"], strict=True)
    )


def assert_alike(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    """The same tokens, and numbers that rows at other places round otherwise."""
    assert found.keys() == expected.keys()
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert found[name] == pytest.approx(expected[name], abs=1e-4)
    for one, other in zip(found["top_logprobs"], expected["top_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.bits
def test_a_scored_prompt(served: Served) -> None:
    """What evaluations ask for: the log-probabilities of the prompt."""
    text = "What is 2 + 3? 😀"
    ids = TOKENIZER.encode(text)
    body = {"prompt": [text, ids], "max_tokens": 1, "logprobs": 1, "echo": True}
    body |= {"temperature": 0, "ignore_eos": True}
    found = served.post(COMPLETE, body).json()
    first, second = found["choices"]
    assert first["text"] == second["text"] and first["text"].startswith(text)
    logprobs = first["logprobs"]
    assert_alike(second["logprobs"], logprobs)
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    scored = served.service.llm.generate(text, max_tokens=1, prompt_logprobs=1)
    for value, entry in zip(
        logprobs["token_logprobs"][1:-1], scored[0].prompt_logprobs[1:], strict=True
    ):
        assert value == pytest.approx(entry.logprob, abs=1e-4)
    events = served.events(COMPLETE, body)
    for index in range(2):
        mine = [c for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(choice["text"] for choice in mine) == first["text"]
        joined = {n: [v for c in mine for v in c["logprobs"][n]] for n in logprobs}
        assert_alike(joined, logprobs)
    alone = served.post(COMPLETE, body | {"max_tokens": 0}).json()["choices"][0]
    assert alone["text"] == text
    assert alone["logprobs"]["tokens"] == logprobs["tokens"][:-1]
    three = served.post(COMPLETE, body | {"n": 3}).json()["choices"]
    assert [choice["logprobs"]["tokens"][:2] for choice in three] == [
        logprobs["tokens"][:2]
    ] * 6
    answer = served.post(COMPLETE, body | {"n": 3, "stream": True})
    assert answer.json()["error"]["param"] == "n"


def test_offsets_point_at_tokens(served: Served) -> None:
    ids = TOKENIZER.encode("aä€😀z")
    with said(served, ids):
        body = {"prompt": "x", "max_tokens": len(ids), "logprobs": 0}
        (choice,) = served.post(COMPLETE, body).json()["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text == "aä€😀z"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset)


def test_a_chat(served: Served) -> None:
    with said(served, ANSWER):
        answer = served.post(CHAT, {"messages": HELLO, "model": NAME})
    found = answer.json()
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop"
    message = choice["message"]
    assert message["role"] == "assistant" and message["content"] == "132"
    assert message["reasoning"] == "Hm."
    details = found["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(TOKENIZER.encode("Hm."))


def test_a_streamed_chat(served: Served) -> None:
    options = {"stream_options": {"include_usage": True}, "n": 2}
    with said(served, ANSWER):
        events = served.events(CHAT, {"messages": HELLO, **options})
    *parts, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 10
    assert all(part["usage"] is None for part in parts)
    for index in range(2):
        deltas = [
            choice
            for part in parts
            for choice in part["choices"]
            if choice["index"] == index
        ]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert [d["finish_reason"] for d in deltas if d["finish_reason"]] == ["stop"]
        for name, text in (("reasoning", "Hm."), ("content", "132")):
            assert "".join(d["delta"].get(name, "") for d in deltas) == text


def test_usage_in_every_event(served: Served) -> None:
    """As vLLM has it: with include_usage, and counted so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"n": 2, "max_tokens": 30, "ignore_eos": True, "seed": 1}
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETE, {"prompt": "xy"})):
        whole = served.post(path, prompt | asked).json()["usage"]
        body = prompt | asked | {"return_token_ids": True}
        with slow(served.service.llm):
            *parts, last = served.events(path, body | {"stream_options": options})
        usages, came = [part["usage"] for part in parts], 0
        for part, usage in zip(parts, usages, strict=True):
            came += sum(len(c.get("token_ids", ())) for c in part["choices"])
            # What has just come may be counted, and be told in the next event.
            assert came <= usage["completion_tokens"] <= came + 4
            total = usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["total_tokens"] == total
        assert came == 60 and last["choices"] == []
        for usage in (usages[-1], last["usage"]):
            assert usage["prompt_tokens"] == whole["prompt_tokens"]
            assert usage["completion_tokens"] == 60
        # It says how to tell the usage, and not whether to.
        alone = {"stream_options": options | {"include_usage": False}}
        assert all("usage" not in part for part in served.events(path, prompt | alone))


def test_logprobs_of_prompts(served: Served) -> None:
    """In vLLM's form; of a prompt's samples, the first one has them."""
    llm = served.service.llm
    options = {"prompt_logprobs": 2, "max_tokens": 1, "seed": 1, "n": 2}
    ids = llm.input_processor.process_chat(HELLO).tokens
    (text, *_) = llm.generate([ids], max_tokens=1, prompt_logprobs=2).result()
    turn = llm.chat(HELLO, max_tokens=1, prompt_logprobs=2)
    assert turn.choices[0].prompt_logprobs == text.prompt_logprobs
    chat = served.post(CHAT, {"messages": HELLO, **options}).json()
    first, second = served.post(COMPLETE, {"prompt": ids, **options}).json()["choices"]
    assert second["prompt_logprobs"] is None
    assert chat["prompt_logprobs"] == first["prompt_logprobs"]
    nothing, *told = first["prompt_logprobs"]
    assert nothing is None and len(told) == len(ids) - 1
    for token, named, entry in zip(
        ids[1:], told, text.prompt_logprobs[1:], strict=True
    ):
        own = named[str(token)]
        assert own["rank"] == entry.rank
        assert own["logprob"] == pytest.approx(entry.logprob, abs=1e-5)
        assert own["decoded_token"] == TOKENIZER.decode([token])
        assert {*named} == {str(token), *(str(other) for other, _ in entry.top)}
        ranked = {given["rank"]: int(other) for other, given in named.items()}
        assert [ranked[1], ranked[2]] == [other for other, _ in entry.top]
    whole = served.post(COMPLETE, {"prompt": ids, **options, "prompt_logprobs": None})
    assert "prompt_logprobs" not in whole.json()["choices"][0]
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETE, {"prompt": ids})):
        for wrong in ({"stream": True}, {"prompt_logprobs": -1}):
            answer = served.post(path, {**body, **options, **wrong})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "prompt_logprobs"


def test_each_choice_ends_when_it_ends(served: Served) -> None:
    llm = served.service.llm
    first = TOKENIZER.encode(ANSWER, special=True)
    more = ANSWER.replace("132", "132, " * 30)
    scripts = first, TOKENIZER.encode(more, special=True)
    options = {"n": 2, "seed": 4, "stream_options": {"include_usage": True}}

    def babble(seed: int, place: int) -> int:
        script = scripts[seed != 4]
        return script[min(place, len(script) - 1)]

    with babbling(llm, babble), slow(llm):
        *parts, usage = served.events(CHAT, {"messages": HELLO, **options})
    assert usage["choices"] == [] and usage["usage"]
    told = [choice for part in parts for choice in part["choices"]]
    ends = [place for place, choice in enumerate(told) if choice["finish_reason"]]
    assert [told[place]["index"] for place in ends] == [0, 1]
    assert len(told) - 1 == ends[1] > ends[0] + 30
    assert all(choice["index"] == 1 for choice in told[ends[0] + 1 :])


def test_tools(served: Served) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "auto"}
    with said(served, CALL):
        (choice,) = served.post(CHAT, body).json()["choices"]
        events = served.events(CHAT, body)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    calls = [
        call
        for event in events
        for call in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert calls[0]["function"]["name"] == "add" and calls[0]["id"]
    assert all("id" not in call for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    # What came back goes in again, under either name of the reasoning.
    for name in ("reasoning", "reasoning_content"):
        message = dict(choice["message"])
        message[name] = message.pop("reasoning")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "132"}
        with said(served, ANSWER):
            answer = served.post(CHAT, {"messages": [*HELLO, message, result]})
        assert answer.status_code == 200, answer.text


def test_no_tools_are_offered_where_none_may_be_called(served: Served) -> None:
    def prompt_tokens(**options: Any) -> int:
        answer = served.post(CHAT, {"messages": HELLO, "max_tokens": 1, **options})
        return answer.json()["usage"]["prompt_tokens"]

    assert prompt_tokens(tools=TOOLS, tool_choice="none") == prompt_tokens()
    assert prompt_tokens(tools=TOOLS) > prompt_tokens()


def test_logprobs_of_a_chat(served: Served) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "seed": 1}
    with said(served, ANSWER):
        (choice,) = served.post(CHAT, body).json()["choices"]
        events = served.events(CHAT, body)
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [
        TOKENIZER.decode([id]) for id in TOKENIZER.encode(ANSWER, special=True)
    ]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    with said(served, ANSWER):
        body |= {"return_tokens_as_token_ids": True}
        (choice,) = served.post(CHAT, body).json()["choices"]
    names = [f"token_id:{id}" for id in TOKENIZER.encode(ANSWER, special=True)]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names


def test_stop_strings(served: Served) -> None:
    with said(served, ANSWER):
        body = {"messages": HELLO, "stop": "3"}
        (choice,) = served.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"] == "1"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "3")


def test_models(served: Served) -> None:
    found = served.client.get("/v1/models").json()
    assert [card["id"] for card in found["data"]] == [NAME, "alias"]
    assert served.client.get("/v1/models/alias").json()["root"] == NAME
    assert served.client.get("/v1/models/other").status_code == 404
    assert served.post(COMPLETE, {"prompt": "x", "model": "alias"}).status_code == 200


def test_control_tokens_in_a_text_prompt(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the body says so; else they are text, which is told once."""
    llm, path = served.service.llm, "/tokenize"
    chat = llm.input_processor.process_chat(HELLO).tokens
    text = TOKENIZER.decode(chat)
    found = served.post(path, {"prompt": text, "parse_special": True}).json()
    assert found["tokens"] == chat
    llm.input_processor.warned.clear()
    for more in ({}, {}, {"parse_special": False}):
        found = served.post(path, {"prompt": text, **more}).json()["tokens"]
        assert found == TOKENIZER.encode(text) != chat
    (warning,) = [one for one in caplog.messages if "parse_special" in one]
    assert "<|start|>" in warning
    body = {"prompt": text, "parse_special": True, "return_token_ids": True}
    found = served.post(COMPLETE, body).json()["choices"][0]
    assert found["prompt_token_ids"] == chat
    (output,) = llm.generate(text, parse_special=True, max_tokens=1)
    assert output.prompt_token_ids == chat
    for wrong in ({"parse_special": "perhaps"}, {"parse_special": 2}):
        assert served.post(COMPLETE, {"prompt": "x", **wrong}).status_code == 400
    with pytest.raises(ValueError, match=r"parse_special .*messages hold no control"):
        llm.chat(HELLO, parse_special=True)


def test_tokens(served: Served) -> None:
    text = "What is 2 + 3? 😀"
    found = served.post("/tokenize", {"prompt": text, "return_token_strs": True})
    found = found.json()
    assert found["tokens"] == TOKENIZER.encode(text)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    back = served.post("/detokenize", {"tokens": found["tokens"]}).json()
    assert back == {"prompt": text}
    chat = served.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert TOKENIZER.decode(chat).endswith("<|start|>assistant")
    for body in (
        {},
        {"prompt": "x"} | {"messages": HELLO},
        {"prompt": "x", "tools": []},
    ):
        assert served.post("/tokenize", body).status_code == 400
    assert served.post("/detokenize", {"tokens": [10**9]}).status_code == 400
    strict = {"name": "add", "parameters": True, "strict": True}
    body = {"messages": HELLO, "tools": [{"type": "function", "function": strict}]}
    error = served.post("/tokenize", body).json()["error"]
    assert (
        error["param"].startswith("tools") and "expected 'object'" in error["message"]
    )


def test_health_and_metrics(served: Served) -> None:
    assert served.client.get("/health").json() == {"status": "ok"}
    served.events(COMPLETE, {"prompt": "x", "max_tokens": 2})
    text = served.client.get("/metrics").text
    for name in (
        "simplellm:num_requests_running{",
        "simplellm:num_requests_waiting{",
        "simplellm:kv_cache_usage_perc{",
        "simplellm:generation_tokens_total{",
        "simplellm:prompt_tokens_total{",
        "simplellm:prefix_cache_hits_total{",
        "simplellm:time_to_first_token_seconds_bucket{",
        "simplellm:request_time_per_output_token_seconds_count{",
        "simplellm:e2e_request_latency_seconds_count{",
        'simplellm:request_success_total{engine="0",finished_reason="length"',
    ):
        assert name in text, name
    assert f'model_name="{NAME}"' in text


def test_a_first_token_counts_once_though_its_client_leaves(served: Served) -> None:
    def count() -> float:
        text = served.client.get("/metrics").text
        name = "simplellm:time_to_first_token_seconds_count"
        (found,) = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return float(found)

    before = count()
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", COMPLETE, json=body) as answer:
        next(answer.iter_lines())
        assert count() == before + 1
    for more in ({"stream": True}, {"stream": False}):
        served.post(COMPLETE, body | more | {"max_tokens": 2})
    assert count() == before + 3


def test_metrics_of_several_servers_are_one_text(served: Served) -> None:
    """Which has all of their values, and each name once."""

    def values(text: bytes) -> set[Any]:
        samples = [s for f in parse_metrics(text.decode()) for s in f.samples]
        return {(s.name, *sorted(s.labels.items()), s.value) for s in samples}

    served.events(COMPLETE, {"prompt": "x", "max_tokens": 2})
    other = ServerMetrics(served.service.llm, NAME, "other")
    texts = [served.service.metrics.text(), other.text()]
    joined = join_texts(texts)
    names = [family.name for family in parse_metrics(joined.decode())]
    assert len(names) == len({*names}) > 20
    assert values(joined) == values(texts[0]) | values(texts[1])
    assert b'engine="other"' in joined


def test_metrics_tell_where_the_time_of_a_request_went(folder: Path) -> None:
    """Of three requests one waits until the two before it are over."""

    def spent(text: str, span: str) -> float:
        name = f"simplellm:request_{span}_time_seconds_sum"
        (found,) = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return float(found)

    config = replace(SMALL, max_num_seqs=2)
    body = {"prompt": [[5, 6]] * 3, "max_tokens": 10, "ignore_eos": True}
    with LLM(folder, config, device="cpu") as llm, slow(llm), serving(llm) as server:
        served = server.post(COMPLETE, body)
        assert served.status_code == 200
        text = server.client.get("/metrics").text
    for span in ("queue", "prefill", "decode", "inference"):
        count = f'simplellm:request_{span}_time_seconds_count{{engine="0"'
        assert re.search(rf"^{re.escape(count)}.*}} 3.0$", text, re.MULTILINE), text
    queue, inference = spent(text, "queue"), spent(text, "inference")
    prefill, decode = spent(text, "prefill"), spent(text, "decode")
    assert inference == pytest.approx(prefill + decode)
    assert decode > 3 * 9 * STEP and 3 * STEP < prefill < decode
    assert 10 * STEP < queue < inference  # the third one's


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "x" * 10**4}, "prompt"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "3"}, "max_tokens"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": True}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 10**6}, "n"),
    ({"prompt": ["x"] * 200, "n": 100}, "n"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": 5}, "stop"),
    ({"prompt": "x", "stop": ["x"] * 100}, "stop"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": 1000}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": "x", "logit_bias": [5]}, "logit_bias"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    ({"prompt": "x", "stream": True, "stream_options": []}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"a": 1}}, "stream_options.a"),
    ({"prompt": "x", "temprature": 1}, "temprature"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "guided_json": {}}, "guided_json"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "x", "response_format": 5}, "response_format"),
    (
        {"prompt": "x", "structured_outputs": {"json": {"not": {}}}},
        "structured_outputs.json",
    ),
    ({"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"prompt": "x", "seed": 2**70}, "seed"),
]
BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "robot"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]},
        "messages[0].tool_call_id",
    ),
    ({"messages": [{"role": "assistant", "reasoning": 5}]}, "messages[0].reasoning"),
    (
        {"messages": [{"role": "assistant", "reasoning_content": False}]},
        "messages[0].reasoning_content",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": HELLO * 10_000}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": HELLO, "tools": [{}]}, "tools[0].name"),
    ({"messages": HELLO, "tools": {}}, "tools"),
    ({"messages": HELLO, "tools": TOOLS * 2}, "tools[1].name"),
    ({"messages": HELLO, "tool_choice": "auto"}, "tool_choice"),
    ({"messages": HELLO, "tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HELLO, "tools": TOOLS, "tool_choice": {}}, "tool_choice.type"),
    (
        {
            "messages": HELLO,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "sub"}},
        },
        "tool_choice",
    ),
    (
        {"messages": HELLO, "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
    ),
    (
        {
            "messages": HELLO,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"items": {"not": {}}}},
            },
        },
        "response_format.json_schema.schema",
    ),
    (
        {
            "messages": HELLO,
            "tools": [
                {
                    "function": {
                        "name": "f",
                        "strict": True,
                        "parameters": {"type": "string"},
                    }
                }
            ],
        },
        "tools[0].parameters.type",
    ),
    ({"messages": HELLO, "reasoning_effort": "max"}, "reasoning_effort"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": 2}, "logprobs"),
    (
        {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 2},
        "max_completion_tokens",
    ),
    ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": HELLO, "functions": [], "tools": []}, "functions"),
    ({"messages": HELLO, "function_call": "auto"}, "function_call"),
    ({"messages": HELLO, "modalities": ["audio"]}, "modalities"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [(COMPLETE, *case) for case in BAD] + [(CHAT, *case) for case in BAD_CHATS],
)
def test_bad_bodies(
    strict: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = strict.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize("name", ["stream_options", "logit_bias", "seed", "best_of"])
def test_null_counts_as_absent(served: Served, name: str) -> None:
    body = {"prompt": "x", "max_tokens": 1, name: None}
    assert served.post(COMPLETE, body).status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"ignore_eos": True},
        {"stop_token_ids": [5]},
        {"priority": -3},
        {"best_of": 1},
        {"user": "me"},
        {"logit_bias": {"5": 3, "7": -100}},
        {"response_format": {"type": "text"}},
    ],
)
def test_parameters_of_others(served: Served, options: dict[str, Any]) -> None:
    body = {"prompt": "x", "max_tokens": 2, **options}
    assert served.post(COMPLETE, body).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_bodies_that_are_no_object(served: Served, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in (COMPLETE, CHAT, "/tokenize"):
        answer = served.client.post(path, content=raw, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_a_body_that_is_not_said_to_be_json(served: Served) -> None:
    answer = served.client.post(COMPLETE, content=b'{"prompt": "x"}')
    assert answer.status_code == 415


def test_a_body_is_read_if_it_can_be(served: Served) -> None:
    """Windows marks files as UTF-8, and agents cut texts inside of a character."""

    def asked(text: bytes) -> list[int]:
        raw = b'{"prompt": "%b", "max_tokens": 1, "return_token_ids": true}' % text
        if text == b"marked":
            raw = b"\xef\xbb\xbf" + raw
        headers = {"content-type": "application/json; charset=utf-8, application/json"}
        answer = served.client.post(COMPLETE, content=raw, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["prompt_token_ids"]

    encode = served.service.llm.tokenizer.encode
    assert asked(b"marked") == encode("marked")
    cut, whole = b"\\ud83d", b"\\ud83d\\ude00"
    assert asked(b"a" + cut + b"\\n" + whole + cut) == encode(
        "a\ufffd\n\U0001f600\ufffd"
    )
    assert asked(b"\\\\ud83d" + b"\\ude00" + b"b") == encode("\\ud83d\ufffdb")
    raw = '{"prompt": "é"}'.encode("latin-1")
    headers = {"content-type": "application/json"}
    answer = served.client.post(COMPLETE, content=raw, headers=headers)
    assert answer.status_code == 400 and "not JSON in UTF-8" in answer.text


def test_arguments_that_are_nested_too_deep(served: Served) -> None:
    """Deeper than Python's own JSON can write them."""
    raw = b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": '
    raw += b'{"name": "f", "arguments": %b}}]}]}' % (b"[" * 1000 + b"]" * 1000)
    headers = {"content-type": "application/json"}
    answer = served.client.post(CHAT, content=raw, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0]" and "too deep" in error["message"]


def test_names_are_repeated_in_part(served: Served) -> None:
    """A client gets no megabyte back for the megabyte that it sends."""
    long = "x" * 50_000
    answers = [
        served.post(COMPLETE, {"prompt": {long: 1}}),
        served.post(COMPLETE, {"prompt": "x", "model": long}),
        served.post(CHAT, {"messages": HELLO, "tool_choice": {"a": long}}),
        served.client.get(f"/{long}"),
        served.client.post(COMPLETE, content=b"{}", headers={"content-type": long}),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500 and len(answer.content) < 1000


def test_an_object_says_how_long_it_is(served: Served) -> None:
    """So that clients of HTTP/1.0 can read it, who know no chunks."""
    answer = served.post(COMPLETE, {"prompt": "x", "max_tokens": 2})
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "transfer-encoding" not in answer.headers


def test_a_body_that_is_too_long(served: Served) -> None:
    headers = {"content-type": "application/json"}
    long = b" " * (MAX_BODY + 1)
    said = served.client.post(COMPLETE, content=long, headers=headers)
    in_chunks = served.client.post(COMPLETE, content=iter([long]), headers=headers)
    assert [said.status_code, in_chunks.status_code] == [413, 413]
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_compressed_bodies(
    served: Served, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    """They are as good as others, and no longer than others may be."""

    def post(content: bytes, encoding: str = encoding) -> httpx.Response:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        return served.client.post(COMPLETE, content=content, headers=headers)

    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    assert post(pack(body)).json()["usage"]["completion_tokens"] == 2
    assert post(pack(b" " * (MAX_BODY + 1))).status_code == 413
    for broken in (body, pack(body)[:-3], pack(body) + b"x", b""):
        assert post(broken).json()["error"]["code"] == "invalid_encoding"
    answer = post(body, "zstd")
    assert answer.status_code == 415 and "'zstd'" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "gzip"


def test_pages_of_other_origins(served: Served) -> None:
    """They may ask if the server was told so, and no others."""
    ours = "https://example.org"
    asks = {"access-control-request-method": "POST", "origin": ours}
    asks["access-control-request-headers"] = "authorization, content-type"
    assert served.client.options(COMPLETE, headers=asks).status_code == 405
    options = {"key": "k", "allowed_origins": [ours]}
    with serving(served.service.llm, **options) as other:
        answer = other.client.options(COMPLETE, headers=asks)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ours
        theirs = asks | {"origin": "https://example.com"}
        assert other.client.options(COMPLETE, headers=theirs).status_code == 400
        headers = {"authorization": "Bearer k", "origin": ours}
        body = {"prompt": "x", "max_tokens": 1}
        answer = other.post(COMPLETE, body, headers=headers)
        assert answer.headers["access-control-allow-origin"] == ours
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        answer = other.post(COMPLETE, body, headers={"origin": ours})
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == ours


def test_a_large_body_is_read_in_another_thread(served: Served) -> None:
    body = {"prompt": "x" * 50_000}
    answer = served.post(COMPLETE, body)
    assert answer.status_code == 400 and "tokens" in answer.json()["error"]["message"]


def test_paths_and_methods(served: Served) -> None:
    answer = served.client.get("/v1/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    answer = served.post("/v1/responses/compact", {"model": NAME, "input": []})
    assert (
        answer.status_code == 404 and "a summary" in answer.json()["error"]["message"]
    )
    error = served.client.get("/v1/messages/batches").json()
    assert error["type"] == "error" and error["error"]["type"] == "not_found_error"
    answer = served.client.get(COMPLETE)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = served.post(COMPLETE, {"prompt": "x", "model": "gpt-4"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404, "model")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1//chat/completions/", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/completions", COMPLETE),
        ("/responses", "/v1/responses"),
        ("/messages", "/v1/messages"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_paths_as_clients_make_them_of_a_base_url(
    served: Served, path: str, meant: str
) -> None:
    """It may lack the "/v1", or have it although the client adds it; or a slash."""
    answer = served.post(path, {"prompt": {}, "messages": 5, "input": 5})
    same = served.post(meant, {"prompt": {}, "messages": 5, "input": 5})
    assert answer.status_code == same.status_code == 400
    assert answer.json() == same.json()


def test_paths_of_a_base_url_that_are_asked_for(served: Served) -> None:
    known = served.client.get("/v1/models").json()
    for path in ("/models", "/models/?", "/v1/models/", "/api/v1/models"):
        assert served.client.get(path).json() == known
    assert served.client.get("/models/alias").json()["id"] == "alias"
    assert served.client.get("/v1/health").status_code == 200
    for path in ("/v1", "/v1/", "/api/tags", "/v1/chat", "/v1/v1"):
        answer = served.client.get(path)
        assert answer.status_code == 404 and "/v1/models" in answer.text
    with serving(served.service.llm, key="k") as other:
        assert other.client.get("/v1/health/").status_code == 200
        assert other.client.get("/models//").status_code == 401


def test_request_ids_go_through(served: Served) -> None:
    def id_of(given: str) -> str:
        answer = served.client.get("/health", headers={"x-request-id": given})
        return answer.headers["x-request-id"]

    assert id_of("abc-123") == "abc-123"
    assert id_of("").startswith("req-")
    assert id_of("x" * 1000).startswith("req-")
    answer = served.client.get("/nowhere", headers={"x-request-id": "lost"})
    assert answer.headers["x-request-id"] == "lost"


@pytest.mark.parametrize("access_log", ["requests", "prompts"])
def test_the_access_log(
    served: Served, caplog: pytest.LogCaptureFixture, access_log: str
) -> None:
    """A line for each request; what a client wrote is in none, unless asked for."""
    caplog.set_level(logging.INFO, "simplellm.access")
    with serving(served.service.llm, access_log=access_log) as other:
        other.post(COMPLETE, {"prompt": "a secret", "max_tokens": 2})
        until(lambda: len(caplog.messages) == 1)  # a line comes behind the answer
        other.post(COMPLETE, {"prompt": {"a": "secret"}})
        until(lambda: len(caplog.messages) == 2)
        other.events(COMPLETE, {"prompt": "a secret", "max_tokens": 2})
        until(lambda: len(caplog.messages) == 3)
        other.client.get("/health")
        until(lambda: len(caplog.messages) == 4)
    lines = [json.loads(message) for message in caplog.messages]
    assert [line["status"] for line in lines] == [200, 400, 200, 200]
    assert [line["path"] for line in lines] == [COMPLETE] * 3 + ["/health"]
    assert lines[0]["completion_tokens"] == lines[2]["completion_tokens"] == 2
    assert lines[1]["param"] == "prompt"
    assert all(line["seconds"] >= 0 and line["request_id"] for line in lines)
    assert ("secret" in "".join(caplog.messages)) == (access_log == "prompts")


def test_a_full_queue(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(requests: object) -> None:
        raise QueueFullError("7 requests wait already")

    monkeypatch.setattr(served.service.llm.engine, "submit", full)
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
        answer = served.post(COMPLETE, body)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_the_document_is_true(strict: Served) -> None:
    """Every parameter it names is read, and no others are."""
    document = strict.client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["CompletionBody"]
    assert "prompt" in schema["required"] and not schema["additionalProperties"]
    for name in schema["properties"]:
        body = {"prompt": "x", "max_tokens": 1, name: None}
        if name != "prompt":
            assert strict.post(COMPLETE, body).status_code == 200, name
    assert schema["properties"]["temperature"]["anyOf"][0]["maximum"] == 100
    assert json.dumps(schema["properties"]["best_of"]["enum"]) == "[1, null]"
    for kind in ("CompletionBody", "ChatBody"):  # the default is another place's
        properties = document["components"]["schemas"][kind]["properties"]
        assert "default" not in properties["max_tokens"] | properties["temperature"]
        assert properties["presence_penalty"]["default"] == 0
    tags = {
        path: method["tags"][0]
        for path, methods in document["paths"].items()
        for method in methods.values()
    }
    assert tags["/v1/messages"] == tags["/v1/messages/count_tokens"] == "Anthropic"
    assert tags["/v1/completions"] == tags["/v1/models"] == "OpenAI"
    assert tags["/tokenize"] == tags["/detokenize"] == "Tokens"
    assert tags["/metrics"] == "Operations"


def test_keys(served: Served) -> None:
    with serving(served.service.llm, key="s3cret") as other:

        def get(path: str, **headers: str) -> httpx.Response:
            return other.client.get(path, headers=headers)

        for key in ("", "Bearer", "Bearer wrong", "Bearer s3cretx", "Basic s3cret"):
            answer = get("/v1/models", authorization=key)
            assert answer.status_code == 401, key
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert get("/v1/nowhere").status_code == 401
        assert get("/v1/models", authorization="Bearer s3cret").status_code == 200
        assert get("/v1/models", **{"x-api-key": "s3cret"}).status_code == 200
        odd = {b"authorization": "Bearer s3crét".encode()}
        assert other.client.get("/v1/models", headers=odd).status_code == 401
        for path in ("/health", "/docs", "/openapi.json"):
            assert get(path).status_code == 200
