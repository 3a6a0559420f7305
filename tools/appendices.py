"""How appendices A, B and C ask an engine, so that it calls what they have written.

`mine.py` makes a module of a page's blanks that belong to none of the package. `ANSWER`
asks with it: through the page's server and its client, under its masks, or in its
families and formats.
"""

import asyncio
import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple
from unittest.mock import patch

from blanks import Blank

# Beside a page's blanks, what an engine is asked with.
MASKS = "b-structured-output"
NEEDED = {
    "a-serving": {"Turn"},
    MASKS: {"Automaton", "lay_flat"},
    "c-other-models": set[str](),
}
ANY_TEXT = {"regex": "(?s:.*)"}
FINAL = "<|start|>assistant<|channel|>final<|message|>"
# Models with random weights, whose shapes are small and whose texts mean nothing.
SMALL = {
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 101,
    "eos_token_id": 7,
}
KINDS: dict[str, dict[str, Any]] = {
    "Phi3": {"model_type": "phi3", "sliding_window": 19},
    "SmolLM3": {"model_type": "smollm3"},
    "Qwen3Moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
    },
}


class How(NamedTuple):
    """How an engine is asked; all of it is JSON."""

    appendix: str = ""  # the page, one of NEEDED
    model: str | None = None
    form: str = ""  # that answers have to fit, as Python writes it


def placed(blank: Blank, appendix: str) -> Blank:
    """``blank`` in the module that a copy has it in while its page is asked."""
    if blank.module or blank.chapter != appendix:
        return blank
    return blank._replace(module=f"simplellm.appendices.{appendix.replace('-', '_')}")


def appendix_of(how: How) -> Any:
    """The module, in the process that imports the copy."""
    return import_module(f"simplellm.appendices.{how.appendix.replace('-', '_')}")


def as_chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


# Appendix A: the page's handler on a socket, read by the page's client


class Replies:
    """One reply by the page's `read_async`, which waits in the page's `Mailbox`."""

    def __init__(
        self, appendix: Any, output_processor: Any, request: Any, reply: Any
    ) -> None:
        self.reply, self.box, self.ended = reply, appendix.Mailbox(), False
        self.parts = appendix.read_async(output_processor, request, reply)
        self.filling = asyncio.create_task(self.fill())

    async def fill(self) -> None:
        try:
            async for part in self.parts:
                self.box.put(part)
        finally:
            await self.parts.aclose()
            self.ended = True
            self.box.arrived.set()

    async def __aiter__(self) -> Any:
        while not self.ended or self.box.waiting:
            for part in await self.box.take():
                yield 0, part
        await self.filling  # raises what went wrong

    def outputs(self) -> list[Any]:
        return [self.reply.output()]

    async def aclose(self) -> None:
        self.filling.cancel()
        await asyncio.gather(self.filling, return_exceptions=True)


@contextmanager
def on_a_socket(app: Any) -> Iterator[int]:
    """The port of an ASGI app that runs in a thread."""
    import uvicorn

    options: dict[str, Any] = {"lifespan": "off", "log_config": None}
    server = uvicorn.Server(uvicorn.Config(app, port=0, interface="asgi3", **options))
    # A handler that never ends must not hold up the answer that says so.
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=5)


def answer_by_server(
    how: How, prompts: Sequence[str], start: Any, options: dict[str, Any]
) -> list[str]:
    """What clients of the page's server get, all prompts at once."""
    appendix, llm = appendix_of(how), start(how.model)
    get = llm.input_processor

    class Front:
        """An LLM whose replies come by the page's way."""

        input_processor = get

        def replies(self, spec: Any, n: int | None = None, chat: bool = True) -> Any:
            ((sample,),) = llm._samples([spec], n, chat)
            return Replies(appendix, llm._output_processor, *sample)

    def ask(prompt: str) -> str:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        line.request("POST", "/", json.dumps({"messages": as_chat(prompt)} | options))
        response = line.getresponse()
        said = [text for _, text in appendix.read_events(iter(response.read1, b""))]
        line.close()
        chunks = [json.loads(text)["choices"][0]["delta"] for text in said[:-1]]
        return "".join(delta.get("content", "") for delta in chunks)

    clients = ThreadPoolExecutor(len(prompts))
    with llm, on_a_socket(partial(appendix.serve_chat, Front())) as port, clients:
        return [*clients.map(ask, prompts)]


# Appendix B: the page's masks and forced tokens, as a grammar that the engine follows


def own_grammar(appendix: Any, node: Any, llm: Any, end: int) -> Any:
    """A `Grammar` of expression ``node`` whose states and masks are the page's."""
    from simplellm.base.grammar import GrammarState

    tokenizer = llm.tokenizer
    automaton = appendix.Automaton(node)
    trie = appendix.lay_flat(tokenizer.tokens)
    masks = appendix.Masks(automaton, trie, llm.config.vocab_size, end)

    class OwnState(GrammarState):
        def __init__(self) -> None:
            self.length, self.state = 0, 0

        def advance(self, new: Sequence[int]) -> None:
            for id in new:
                self.length += 1
                if id != end:
                    self.state = automaton.run(self.state, tokenizer.tokens[id])

        def forced(self) -> list[int]:
            return appendix.forced(
                automaton, self.state, tokenizer.tokens, tokenizer.encode
            )

        def row(self) -> Any:
            return masks.row(self.state)

    class OwnGrammar:
        def start(self, request_id: int | None = None) -> OwnState:
            return OwnState()

    return OwnGrammar()


def answer_in_form(
    how: How, prompts: Sequence[str], start: Any, options: dict[str, Any]
) -> list[str]:
    """Answers of turns that follow the page's grammar; then those in the form."""
    from simplellm.base.grammar import BitmaskFiller

    appendix = appendix_of(how)

    def fill(filler: Any, states: Sequence[Any], bits: Any) -> None:
        for state, row in zip(states, bits, strict=True):
            row[:] = state.row()

    with start(how.model) as llm:
        chats = [as_chat(prompt) for prompt in prompts]
        given = options | {"structured_outputs": ANY_TEXT}
        turns = [one.choices[0] for one in llm.chat(chats, **given)]
        if not how.form:
            return [turn.content or "" for turn in turns]
        node = eval(how.form, {"frozenset": frozenset})  # what `form_of` has written
        header = llm.tokenizer.encode(FINAL, special=True)
        end = llm.tokenizer.special["<|end|>"], llm.tokenizer.special["<|return|>"]
        grammar = own_grammar(appendix, node, llm, end[1])
        answers = []
        with patch.object(BitmaskFiller, "fill", fill):
            for chat, turn in zip(chats, turns, strict=True):
                asked = llm.input_processor.process_chat(chat, **options)
                ids = [*turn.token_ids]
                thought = ids[: ids.index(end[0]) + 1] if end[0] in ids else []
                spec = replace(
                    asked,
                    tokens=[*asked.tokens, *thought, *header[0 if thought else 2 :]],
                    grammar=grammar,
                )
                ((sample,),) = llm._samples([spec], 1, False)
                answers.append(written(llm, sample))
    pairs = zip(turns, answers, strict=True)
    return [f"{turn.content}\nin the form: {said}" for turn, said in pairs]


def written(llm: Any, sample: Any) -> str:
    """The text of one sample."""
    from simplellm.api.streams import Stream

    parts: Stream[Any] = Stream(llm, llm._output_processor, [[sample]])
    return "".join(part.text for part in parts)


def form_of(node: Any) -> str:
    """An expression as text that another process can read. Raises ValueError."""
    text = repr(node)
    if "<function" in text:
        raise ValueError("form has a rule, which is a function; expected one without")
    return text


# Appendix C: the page's families, and 8-bit weights with the page's products


def families_of(appendix: Any, how: How) -> dict[str, Any]:
    """The page's families by the model type of a config.json."""
    found = {"phi3": appendix.phi3(), "smollm3": appendix.smollm3()}
    if how.model is not None:  # SmolLM2, a Llama: a SmolLM3 whose layers all rotate
        turning = found["smollm3"].defaults | {"no_rope_layer_interval": 99}
        names = {"model_types": ("llama",), "architectures": ("LlamaForCausalLM",)}
        found["llama"] = replace(found["smollm3"], defaults=turning, **names)
    return found


def run_small(appendix: Any, name: str, data: dict[str, Any], start: Any) -> None:
    """Let a small model with random weights write a few tokens."""

    def rope_and_cache(qkv: Any, attn: Any, positions: Any, keys: Any, *rest: Any):
        if attn.q_norm is not None:
            heads = appendix.normed_heads(
                qkv.float(), attn.q_norm, attn.k_norm, keys.shape[2], attn.eps
            )
            qkv = import_module("torch").cat(heads, dim=1).flatten(1)
            attn = replace(attn, q_norm=None, k_norm=None)
        return usual(qkv, attn, positions, keys, *rest)

    with TemporaryDirectory() as folder:
        config = SMALL | data | {"architectures": [f"{name}ForCausalLM"]}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        with start(folder, random_weights=True) as llm:
            usual = llm.model.ops.rope_and_cache
            llm.model.ops = replace(llm.model.ops, rope_and_cache=rope_and_cache)
            llm.generate([1, 2, 3], max_tokens=8, temperature=0).result()


def answer_in_eight_bits(
    how: How, prompts: Sequence[str], start: Any, options: dict[str, Any]
) -> list[str]:
    """Answers with the layers' weights in INT8 and in FP8, after the small models."""
    from simplellm.api import load
    from simplellm.apps.bench_formats import RoundedCheckpoint
    from simplellm.checkpoint.families import FAMILIES
    from simplellm.checkpoint.formats import SCHEMES

    appendix = appendix_of(how)
    FAMILIES.update(families_of(appendix, how))
    for name, data in KINDS.items():
        run_small(appendix, name, data, start)
    opened = load.open_weights
    said = []
    for kind in "int", "float":
        form = SCHEMES[kind, 8, "channel"]

        def rounded(*arguments: Any, form: Any = form, **more: Any) -> Any:
            return RoundedCheckpoint(opened(*arguments, **more), form)

        with patch.object(load, "open_weights", rounded), start(how.model) as llm:
            chats = [as_chat(prompt) for prompt in prompts]
            found = llm.chat(chats, **options)
        said.append([f"{form.name}: {one.choices[0].content}" for one in found])
    return ["\n".join(lines) for lines in zip(*said, strict=True)]


ANSWER = {
    "a-serving": answer_by_server,
    MASKS: answer_in_form,
    "c-other-models": answer_in_eight_bits,
}
