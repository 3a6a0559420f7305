"""Tokenizers and chat templates of the families people run, small, for tests.

The tokenizers are trained here, by the library, in the files' real forms. The templates
have the shape of those that come with the models, shortened.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from simplellm.base.files import FolderFiles
from simplellm.text.dialects.dialect import Dialect, open_family, tokenizer_data
from simplellm.text.tokenizer import Tokenizer as OurTokenizer
from simplellm.text.tokenizer import printed_bytes

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 12345 times.\n\n",
    '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}',
    "def f(x):\n    return x ** 2  # naïve café — ünïcödé 日本語 🙂\n",
    "What is 47 + 85? It is 132. You are a helpful assistant.",
] * 4
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = "<|endoftext|> <|im_start|> <|im_end|>"
QWEN_TAGS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
WORDS = "covid19 6G-RAN2"  # as people add them for their field
LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> "
    "<|eot_id|> <|eom_id|> <|python_tag|>"
)
HTML = "<table> </td> <html> </html> <body> <div> <footer> <iframe> <bbox> <s> </s>"
LACKING = (0x04, 0x06, 0x13, 0xF3)  # bytes
MISTRAL = "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS]"
TEKKEN = f"<unk> <s> </s> {MISTRAL} [TOOL_RESULTS] [/TOOL_RESULTS] [CALL_ID] [ARGS]"


def added(names: str, special: bool = True) -> list[AddedToken]:
    return [
        AddedToken(name, special=special, normalized=False) for name in names.split()
    ]


def byte_level(
    regex: str | None,
    names: str,
    tags: str = "",
    nfc: bool = False,
    lacking: Sequence[int] = (),
) -> Tokenizer:
    """As Qwen, Llama 3 and, without a regex of its own, GPT-2; some bytes may lack."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if regex is not None:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        level = pre_tokenizers.Sequence([split, without_regex()])
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    missing = {char for char, byte in printed_bytes().items() if byte in lacking}
    alphabet = [*{*pre_tokenizers.ByteLevel.alphabet()} - missing]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(added(names))
    tokenizer.add_tokens(added(tags, special=False))
    return tokenizer


def without_regex() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def qwen() -> Tokenizer:
    return byte_level(SPLIT, QWEN, f"{QWEN_TAGS} {WORDS}", nfc=True)


def llama() -> Tokenizer:
    tokenizer = byte_level(SPLIT, LLAMA)
    config = json.loads(tokenizer.to_str())
    config["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(config))
    first = "<|begin_of_text|>"
    begin = processors.TemplateProcessing(
        single=f"{first} $A",
        pair=f"{first} $A {first} $B",
        special_tokens=[(first, tokenizer.token_to_id(first))],
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), begin]
    )
    return tokenizer


def gpt2() -> Tokenizer:
    return byte_level(None, "<|endoftext|>")


def smollm() -> Tokenizer:
    """As SmolLM2: its texts lacked some bytes. Digits are cut one by one."""
    tokenizer = byte_level(None, QWEN, lacking=LACKING)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    return tokenizer


def of_old(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json as the library wrote it once, and as GPT-2's on the hub is."""
    model = config["model"]
    for name in ("type", "byte_fallback", "ignore_merges"):
        del model[name]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    return config


def sentencepiece(kind: str) -> Tokenizer:
    """BPE with byte fallback: "mistral" (of either age) or "gemma"."""
    specials = ["<unk>", "<s>", "</s>"]
    if kind == "gemma":
        specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    if kind == "gemma":
        tokenizer.normalizer = space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif kind == "mistral":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            "▁", prepend_scheme="first", split=False
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback()]
    parts += [decoders.Fuse()]
    parts += [] if kind == "gemma" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials + bytes_, show_progress=False
    )
    words = [piece for text in CORPUS for piece in re.split("(?= )", text)]
    tokenizer.train_from_iterator(words, trainer)
    config = json.loads(tokenizer.to_str())
    # The trainer adds them; in the real files bytes are tokens like any others.
    config["added_tokens"] = [
        {**token, "normalized": False}
        for token in config["added_tokens"]
        if token["content"] not in bytes_
    ]
    config["model"]["unk_token"] = "<unk>"
    tokenizer = Tokenizer.from_str(json.dumps(config))
    if kind == "gemma":
        tokenizer.add_special_tokens(added("<start_of_turn> <end_of_turn>"))
        runs = [AddedToken("\n" * n, normalized=False, special=False) for n in (2, 3)]
        tokenizer.add_tokens(runs)
        tokenizer.add_tokens(added(f"{HTML} <unused0>", special=False))
    else:
        tokenizer.add_special_tokens(added(MISTRAL))
    return tokenizer


def unigram(with_bytes: bool = True) -> Tokenizer:
    """As llm-jp's; those of T5 and others have no tokens of bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="first")
    if with_bytes:
        back = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    config = json.loads(tokenizer.to_str())
    if with_bytes:
        bytes_ = [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
        config["model"]["vocab"][3:3] = bytes_
        config["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(config))
    tokenizer.add_special_tokens(added(MISTRAL))
    tokenizer.add_tokens(added(WORDS, special=False))
    return tokenizer


KINDS = {
    "qwen": qwen,
    "llama": llama,
    "coder": qwen,
    "gpt2": gpt2,
    "smollm": smollm,
    "mistral": lambda: sentencepiece("mistral"),
    "old mistral": lambda: sentencepiece("old mistral"),
    "tekken": lambda: byte_level(SPLIT, TEKKEN),
    "gemma": lambda: sentencepiece("gemma"),
    "unigram": unigram,
}

QWEN_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nReturn them within <tool_call></tool_call>.<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n')
                + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA_TEMPLATE = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Given these functions, answer with JSON.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool'
        or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_TEMPLATE = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results"
        or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" }}
            {{- message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should have length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

# Of Mistral's tokenizers since version 11.
TEKKEN_TEMPLATE = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.role == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS]" + tools|tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.role == "assistant" %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "[TOOL_CALLS]" + call.function.name + "[CALL_ID]" + call.id }}
            {{- "[ARGS]" + call.function.arguments|tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "tool" %}
        {{- "[TOOL_RESULTS]" + message.tool_call_id + message.content }}
        {{- "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

GEMMA_TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

# It writes no tools.
SMOLLM_TEMPLATE = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}
{{ '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# Qwen3-Coder, whose calls are XML.
CODER_TEMPLATE = """
{%- if messages[0]["role"] == "system" %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {{- "<|im_start|>system\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n<function=example_function_name>\\n"
        ~ "<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n"
        ~ "</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages if message.role != "system" %}
    {%- if message.role == "tool" %}
        {{- "<|im_start|>user\\n<tool_response>\\n" + message.content }}
        {{- "\\n</tool_response>\\n<|im_end|>\\n" }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function %}
            {{- "\\n<tool_call>\\n<function=" + tool_call.name + ">\\n" }}
            {%- for name, value in tool_call.arguments | items %}
                {{- "<parameter=" + name + ">\\n" }}
                {{- value | string if value is string else value | tojson | safe }}
                {{- "\\n</parameter>\\n" }}
            {%- endfor %}
            {{- "</function>\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""

TEMPLATES = {
    "qwen": QWEN_TEMPLATE,
    "llama": LLAMA_TEMPLATE,
    "mistral": MISTRAL_TEMPLATE,
    "tekken": TEKKEN_TEMPLATE,
    "gemma": GEMMA_TEMPLATE,
    "smollm": SMOLLM_TEMPLATE,
    "coder": CODER_TEMPLATE,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen": {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>"},
    "coder": {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>"},
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "smollm": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    "mistral": {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
    "old mistral": {
        "add_bos_token": True,
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
    },
    "tekken": {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
    "gemma": {"add_bos_token": True, "bos_token": "<bos>", "eos_token": "<eos>"},
    "unigram": {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
}


def write_text_side(folder: Path, kind: str, template: Any = None) -> Path:
    """tokenizer.json, its config and the chat template of a kind."""
    file = folder / "tokenizer.json"
    KINDS[kind]().save(str(file))
    if kind == "gpt2":
        file.write_text(json.dumps(of_old(json.loads(file.read_text("utf-8")))))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SETTINGS[kind]}
    template = TEMPLATES.get(kind) if template is None else template
    if template is not None:
        settings["chat_template"] = template
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return folder


def open_folder(folder: Path) -> tuple[OurTokenizer, Dialect]:
    """Our tokenizer and dialect of what `write_text_side` wrote."""
    files = FolderFiles(folder)
    return open_family(files, tokenizer_data(files) or {})
