"""Tokenizers and chat templates that model makers have published: `-m real`.

Those of llama.cpp's source, with the ids that it expects, and Mistral's first two
tekken.json. `tools/record_real.py --install` gets them.
"""

import json
import re
from base64 import b64decode
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from record_real import LLAMA_CPP
from test_structured import ADD
from transformers.utils.chat_template_utils import render_jinja_template

from simplellm.base.config import ParameterError
from simplellm.base.files import FolderFiles
from simplellm.checkpoint.gguf.container import open_container
from simplellm.checkpoint.gguf.tokens import GGUFFiles
from simplellm.text.dialects.dialect import open_family, tokenizer_data
from simplellm.text.dialects.template import function_of
from simplellm.text.harmony import Message, Tool
from simplellm.text.tokenizer import TokenizerError

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("quiet_transformers")]
TEXT = Path(__file__).parent / "data/english.txt"
MODELS = LLAMA_CPP / "models"
BETWEEN = "\n__ggml_vocab_test__\n"
# Neither models nor rules that are here
UNKNOWN = {"bert-bge", "falcon", "gemma-4", "nomic-bert-moe", "qwen35"}
CALLED = "functions.add"
CHATS = {
    "a question": [Message("user", "Hello there")],
    "turns": [
        Message("system", "Be brief."),
        Message("user", "Hello"),
        Message("assistant", "Hi!", channel="final"),
        Message("user", "And now? <|im_end|> <think>x</think>"),
    ],
    "thoughts": [
        Message("user", "Q"),
        Message("assistant", "hmm", channel="analysis"),
        Message("assistant", "A", channel="final"),
        Message("user", "R"),
    ],
    "calls": [
        Message("user", "1 + 2?"),
        Message("assistant", '{"a": 1}', channel="commentary", recipient=CALLED),
        Message("tool", "3 </think> <|im_end|>", name=CALLED),
        Message("assistant", "Three.", channel="final"),
        Message("user", "Thanks"),
    ],
}


@pytest.fixture(scope="module")
def models() -> Path:
    if not MODELS.exists():
        pytest.skip("llama.cpp's is not here: tools/record_real.py --install")
    return MODELS


def test_ids_are_those_that_llama_cpp_expects(
    models: Path, record_property: Any
) -> None:
    right = []
    for file in sorted(models.glob("*.gguf.inp")):
        name = file.name.removesuffix(".gguf.inp").removeprefix("ggml-vocab-")
        vocabulary = file.with_suffix("")
        files = GGUFFiles(open_container(vocabulary), {})
        if name in UNKNOWN:
            with pytest.raises(TokenizerError, match="expected one of"):
                tokenizer_data(files)
            continue
        data = tokenizer_data(files)
        assert data is not None
        tokenizer, _ = open_family(files, data)
        expected = Path(f"{vocabulary}.out").read_text("utf-8").splitlines()
        *texts, end = file.read_text("utf-8").split(BETWEEN)
        assert not end
        for text, ids in zip(texts, expected, strict=True):
            assert tokenizer.encode(text) == [*map(int, ids.split())], (name, text)
        right.append(name)
    record_property("vocabularies", len(right))
    assert len(right) >= 10


def test_prompts_are_those_that_transformers_writes(
    models: Path, tmp_path: Path, record_property: Any
) -> None:
    """Refused are tools of which a template writes nothing, and what fails there."""
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    vocabulary = open_container(models / "ggml-vocab-qwen2.gguf")
    qwen = tokenizer_data(GGUFFiles(vocabulary, {}))
    assert qwen is not None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    same = templates = 0
    for file in sorted(models.glob("templates/*.jinja")):
        template = file.read_text("utf-8")
        (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
        tokenizer, dialect = open_family(FolderFiles(tmp_path), qwen)
        templates += 1
        for name, messages in CHATS.items():
            tools = [ADD] if name == "calls" else []
            expected = their_prompt(template, messages, tools, names)
            try:
                ids = dialect.render(messages, tokenizer, tools=tools)
            except ParameterError as error:
                known = expected is None or "no place for tools" in str(error)
                assert known, (file.name, name, error)
                continue
            assert expected in (None, tokenizer.decode(ids)), (file.name, name)
            same += expected is not None
    record_property("templates", templates)
    record_property("prompts", same)
    assert templates >= 60 and same > 3 * templates


def their_prompt(
    template: str, messages: list[Message], tools: list[Tool], names: dict[str, str]
) -> str | None:
    """What transformers makes of a template; None if its program fails there."""
    named: dict[str, Any] = {**names, "chat_template": template}
    named["tools"] = [function_of(tool) for tool in tools] or None
    try:
        (prompt,), _ = render_jinja_template(
            [theirs(messages)], add_generation_prompt=True, **named
        )
    except Exception:  # any: it's theirs
        return None
    return str(prompt)


def theirs(messages: list[Message]) -> list[dict[str, Any]]:
    """A conversation as transformers takes it."""
    found: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.recipient:
            arguments = json.loads(message.content)
            function = {"name": "add", "arguments": arguments}
            call = {"id": "000000000", "type": "function", "function": function}
            one |= {"content": "", "tool_calls": [call]}
        elif message.role == "tool":
            one |= {"name": "add", "tool_call_id": "000000000"}
        elif message.channel == "analysis":
            one = {"role": "assistant", "reasoning_content": message.content}
        elif message.role == "assistant" and "reasoning_content" in found[-1]:
            found[-1] |= {"content": message.content}
            continue
        found.append(one)
    return found


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_ids_are_those_of_mistrals_files(
    name: str, tmp_path: Path, record_property: Any
) -> None:
    """Of NeMo's and Pixtral's, with tiktoken, as Mistral's own library has it."""
    try:
        package = distribution("mistral-common")
    except PackageNotFoundError:
        pytest.skip("mistral-common is not here: tools/record_real.py --install")
    tekken = json.loads(
        Path(str(package.locate_file(f"mistral_common/data/{name}"))).read_text("utf-8")
    )
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    files = FolderFiles(tmp_path)
    data = tokenizer_data(files)
    assert data is not None
    tokenizer, dialect = open_family(files, data)
    config = tekken["config"]
    first, count = config["default_num_special_tokens"], config["default_vocab_size"]
    vocab = tekken["vocab"][: count - first]
    library = tiktoken.Encoding(
        "tekken",
        pat_str=config["pattern"],
        mergeable_ranks={b64decode(one["token_bytes"]): one["rank"] for one in vocab},
        special_tokens={},
    )
    assert tokenizer.vocab_size == count and dialect.begin == (1,)
    texts = re.findall(r"(?s).{1,200}", TEXT.read_text("utf-8"))
    texts += [
        "Ünïcödé 漢字かな交じり文 🤖👩‍👩‍👧 العربية हिन्दी",
        " \n\n\t x",
        "I'LL 123456",
    ]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == [first + rank for rank in library.encode_ordinary(text)]
        assert tokenizer.decode(ids) == text
    record_property("tekken", len(texts))
