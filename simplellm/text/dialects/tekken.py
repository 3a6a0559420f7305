"""Mistral's tekken.json, as the tokenizer.json that the hub has for others."""

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from simplellm.base.config import MAX_SIZE, check_number
from simplellm.text.dialects.encoder import field_of
from simplellm.text.tokenizer import printed_bytes

BEGIN = "<s>"  # in front of every text that is no chat
# In order of their ids, what the first files, Mistral NeMo's and Pixtral's, take for
# granted. Later ones list theirs.
DEFAULT_SPECIAL_TOKENS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] "
    "[SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()


def tekken_data(tekken: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer.json of a parsed tekken.json. Raises TypeError or ValueError.

    A token's id is its rank behind the ids that are set aside for control tokens. Which
    pairs merge follows from the tokens, as there is no list of them.
    """
    config = field_of("", tekken, "config", Mapping)
    for name in ("default_num_special_tokens", "default_vocab_size"):
        check_number(f"config.{name}", config.get(name), int, 1, MAX_SIZE)
    first, count = config["default_num_special_tokens"], config["default_vocab_size"]
    char_of = {byte: char for char, byte in printed_bytes().items()}
    vocab = {
        "".join(map(char_of.__getitem__, b64decode(entry["token_bytes"]))): first + rank
        for rank, entry in enumerate(
            field_of("", tekken, "vocab", list)[: count - first]
        )
    }
    special = {name: id for id, name in enumerate(DEFAULT_SPECIAL_TOKENS)}
    if tekken.get("special_tokens") is not None:
        listed = field_of("", tekken, "special_tokens", list)
        special = {token["token_str"]: token["rank"] for token in listed}
    pattern = {"Regex": config.get("pattern")}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [{**split, "pattern": pattern}, {**level, "use_regex": False}]
    begin: dict[str, Any] = {}
    if BEGIN in special:
        begin["single"] = [{"SpecialToken": {"id": BEGIN, "type_id": 0}}]
        begin["special_tokens"] = {BEGIN: {"id": BEGIN, "ids": [special[BEGIN]]}}
    return {
        "added_tokens": [
            {"id": id, "content": name, "special": True} for name, id in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": begin,
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocab},
    }
