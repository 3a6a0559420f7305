"""A model's chat format: harmony, or what its own template says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from simplellm.base.config import MAX_SIZE, ConfigError, ModelConfig, expect, reraise_as
from simplellm.base.files import SmallFiles
from simplellm.base.grammar import Grammar
from simplellm.text.dialects.call_forms import CallForm, tags_grammar
from simplellm.text.dialects.encoder import (
    read_tokenizer,
    require_library,
    reraise_any_as,
)
from simplellm.text.dialects.tags import TagParser
from simplellm.text.dialects.tekken import tekken_data
from simplellm.text.harmony import HarmonyParser, Message, Tool, developer_text, render
from simplellm.text.harmony.schema import Lead, with_format
from simplellm.text.harmony.turn import turn_grammar
from simplellm.text.parser import TurnParser
from simplellm.text.tokenizer import Tokenizer, TokenizerError

END_OF_TURN = "<end_of_turn>"  # Gemma's, which is not its eos_token


@dataclass(frozen=True)
class Dialect:
    """What differs between one chat format and another.

    Conversations come as harmony's messages. ``lead`` makes the content of a developer
    message out of instructions and tools, ``with_format`` has messages tell an answer's
    format, and ``render`` makes the token ids of a prompt. ``parser`` and ``grammar``
    get the tokenizer and the prompt's ids: they are for what the model writes then. The
    grammar also gets what an answer and calls have to fit, as `turn_grammar` does; the
    parser gets the grammar that came of it, if any, and the chat's tools. Where a turn
    can have ``several_calls``, the grammar is also told whether one has to stay alone.
    ``reopen_answer`` takes what follows the last message off the ids of a prompt: if it
    is an answer, the model goes on with it, and the parser is told so. ``ends`` are the
    control tokens that end a turn, as far as the tokenizer has them, ``begin`` the ids
    in front of a text that is no chat.
    """

    lead: Lead
    with_format: Callable[[Sequence[Message], Sequence[Tool], str], Sequence[Message]]
    render: Callable[..., list[int]]
    parser: Callable[..., TurnParser]
    grammar: Callable[..., str]
    ends: tuple[str, ...]
    reopen_answer: Callable[[Tokenizer, list[int]], list[int]]
    begin: tuple[int, ...] = ()
    several_calls: bool = False


def render_harmony(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    reasoning_effort: str | None = None,
    variables: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[int]:
    """`render`, which has no ``variables``. Raises ValueError if there are some."""
    expected = "none: harmony is no template"
    expect(not variables, "chat_template_kwargs", variables, expected)
    effort = "medium" if reasoning_effort is None else reasoning_effort
    return render(messages, tokenizer, reasoning_effort=effort, **options)


def harmony_parser(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    grammar: Grammar | None,
    tools: Sequence[Tool] = (),
    begun: bool = False,
) -> HarmonyParser:
    """A parser of what follows ``prompt``, which may have ``begun`` the answer."""
    parser = HarmonyParser(tokenizer)
    if begun:
        start, message = (tokenizer.special[n] for n in ("<|start|>", "<|message|>"))
        last = [*takewhile(lambda token: token != start, reversed(prompt))][::-1]
        header = last[len(tokenizer.encode("assistant")) : last.index(message) + 1]
        for token in header:
            parser.push(token)
    return parser


def reopen_answer(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """A prompt without `<|end|><|start|>assistant` at its end."""
    return prompt[: -2 - len(tokenizer.encode("assistant"))]


def reopen_turn(
    tokenizer: Tokenizer, prompt: list[int], ends: Sequence[str]
) -> list[int]:
    """A prompt without the last of the control tokens ``ends``, and what follows it."""
    ids = [tokenizer.special[name] for name in ends if name in tokenizer.special]
    places = [place for place, token in enumerate(prompt) if token in ids]
    return prompt[: places[-1]] if places else prompt


HARMONY = Dialect(
    lead=developer_text,
    with_format=with_format,
    render=render_harmony,
    parser=harmony_parser,
    grammar=lambda tokenizer, prompt, *rules, alone: turn_grammar(*rules),
    ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    reopen_answer=reopen_answer,
)


def load_tokenizer_and_dialect(
    files: SmallFiles, config: ModelConfig
) -> tuple[Tokenizer | None, Dialect]:
    """The tokenizer of a checkpoint, if it has one, and how its chats go.

    It may have fewer ids than the embedding has rows: checkpoints pad the vocabulary,
    gpt-oss to 201,088. Raises TokenizerError, or ConfigError if it has more, and for a
    chat template that cannot be used.
    """
    path = files.path_of("tokenizer.json")
    data = tokenizer_data(files)
    if data is None:
        return None, HARMONY
    if config.model_type == "gpt_oss":
        with reraise_as(TokenizerError, path):
            tokenizer, dialect = Tokenizer.from_json(data), HARMONY
    else:
        tokenizer, dialect = open_family(files, data, config.vocab_size)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} token ids; expected at "
            f"most the model's vocab_size, {config.vocab_size}"
        )
    return tokenizer, dialect


def tokenizer_data(files: SmallFiles) -> dict[str, Any] | None:
    """The parsed tokenizer.json, if there is one. Raises TokenizerError.

    Some of Mistral's checkpoints have only a tekken.json, which stands for one.
    """
    with reraise_as(TokenizerError, files.path_of("tokenizer.json")):
        data = files.json("tokenizer.json")
    with reraise_any_as(TokenizerError, files.path_of("tekken.json")):
        tekken = None if data is not None else files.json("tekken.json")
        return data if tekken is None else tekken_data(tekken)


def open_family(
    files: SmallFiles, data: Mapping[str, Any], rows: int = MAX_SIZE
) -> tuple[Tokenizer, Dialect]:
    """Tokenizer and dialect of another model than gpt-oss, of so many ``rows``.

    ``data`` is what its tokenizer.json says.
    """
    path = files.path_of("tokenizer.json")
    with reraise_as(TokenizerError, path):
        require_library("tokenizers")
        require_library("jinja2")
    from simplellm.text.dialects.template import (
        ChatTemplate,
        TemplateSource,
        special_names,
        special_tokens,
    )

    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        with reraise_as(ConfigError, files.path_of(name)):
            settings |= files.json(name) or {}
    source = TemplateSource.read(files, settings)
    naming = [*special_names(settings), *(source.texts() if source else ())]
    tokenizer, encoder = read_tokenizer(path, data, rows, naming)
    named = special_tokens(settings)
    first = tokenizer.special.get(named.get("bos_token", ""))
    begin = encoder.begin
    if (adds := settings.get("add_bos_token")) is not None:
        begin = (first,) if adds and first is not None else ()
    template = ChatTemplate.of(source, named, encoder) if source else None
    form = CallForm.of(tokenizer, source.texts() if source else ())
    ends = named.get("eos_token", ""), END_OF_TURN
    dialect = Dialect(
        lead=lambda instructions, tools: instructions or "",
        with_format=lambda messages, tools, text: messages,
        render=template.render if template else no_template,
        parser=TagParser,
        grammar=partial(tags_grammar, form=form),
        ends=ends,
        reopen_answer=partial(reopen_turn, ends=ends),
        begin=begin,
        several_calls=form is not None,
    )
    return tokenizer, dialect


def no_template(*conversation: Any, **options: Any) -> list[int]:
    """Raise ValueError: a base model has no chats, it continues text."""
    expected = (
        "chat_template.jinja, or chat_template in tokenizer_config.json; a model "
        "without one continues a text: ask it by `generate`, `simplellm batch` or "
        "/v1/completions"
    )
    expect(False, "the chat template of this model", None, expected)
    return []
