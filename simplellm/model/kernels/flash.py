"""Attention of prompts through the flash-attn library, for those who have it installed.

Which of its versions there is decides: 3 is for Hopper alone, where it comes first, 4
for any GPU from there on, 2 for all. Their functions differ in a few names. None knows
pages of any size in all versions, so keys and values are gathered first.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.model.batch import KVGroup

LOGGER = logging.getLogger("simplellm")

# Modules and their versions; the first that is there is taken.
MODULES = {
    "flash_attn_interface": 3,
    "fa3_fwd_interface": 3,
    "flash_attn.cute": 4,
    "flash_attn": 2,
}
HOPPER = 9  # the first number of its compute capability
# By version and head_dim, keys of the only prompt in a step from which on the library,
# with its gather, took 3 % less time than our kernel on an H200, where all heads were
# WIDTH wide: figures/11-flash.json. What isn't here was slower, or wasn't measured.
FASTER_FROM = {(3, 64): 32_768, (3, 128): 8192, (4, 64): 32_768, (4, 128): 32_768}
WIDTH = 4096
MIN_QUERIES = 4096  # by the same times, fewer might not repay the gather of all keys


class Library(NamedTuple):
    """A flash-attn that is installed: its version, and ``flash_attn_varlen_func``."""

    version: int
    function: Callable[..., Any]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, **lengths: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention [T, H, D], and the logarithms of its sums, float32 [H, T]."""
        if self.version == 4:
            left = (None, None) if window is None else (window - 1, 0)
            options = {"window_size": left, "return_lse": True}
        else:
            some = (-1, -1) if window is None else (window - 1, 0)
            options = {"window_size": some, "return_attn_probs": True}
        out, lse, *_ = self.function(q, k, v, causal=True, **lengths, **options)
        return out, lse

    def computes(
        self,
        model: ModelConfig,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> bool:
        """Whether it does, in a trial, for which version 4 compiles its kernels."""
        counts = model.num_attention_heads, model.num_key_value_heads
        q, k = (
            torch.zeros(MIN_QUERIES, count, model.head_dim, dtype=dtype, device=device)
            for count in counts
        )
        ends = torch.tensor([0, MIN_QUERIES], dtype=torch.int32, device=device)
        lengths = {f"cu_seqlens_{x}": ends for x in "qk"}
        most = {f"max_seqlen_{x}": MIN_QUERIES for x in "qk"}
        try:
            self(q, k, k, window, **lengths, **most)
        except Exception as error:  # of whatever package it uses
            why = f"{type(error).__name__}: {error}"
            what = f"flash-attn {self.version}, window {window}"
            LOGGER.warning("%s: our kernel does that, since %s", what, why)
            return False
        return True

    def least_keys(self, model: ModelConfig, capability: tuple[int, int]) -> int | None:
        """Keys of a prompt from which on it's faster than ours; None: it never is."""
        narrow = model.num_attention_heads * model.head_dim < WIDTH
        if narrow or capability[0] != HOPPER:
            return None
        return FASTER_FROM.get((self.version, model.head_dim))


def find_library(capability: tuple[int, int]) -> Library | None:
    """The library for a GPU of this compute capability; None: there is none."""
    for module, version in MODULES.items():
        if version == 3 and capability[0] != HOPPER:
            continue
        try:
            function = import_module(module).flash_attn_varlen_func
        except Exception:  # whatever it needs, or a build that doesn't fit PyTorch
            continue
        return Library(version, function)
    return None


class Plan(NamedTuple):
    """What the sequences of a group read; the GPU is asked once for all layers."""

    pages: Tensor  # int64 [keys], of all sequences, one after the other
    rows: Tensor  # int64 [keys], in the pages
    lengths: dict[str, Any]  # as the library wants them
    first: int  # the first token's number
    stop: int

    @classmethod
    def of(cls, group: KVGroup) -> "Plan":
        counts = group.lengths - group.offsets  # keys whose pages the table names
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
        sequence = torch.arange(len(counts), device=counts.device)
        sequence = sequence.repeat_interleave(counts)
        index = torch.arange(len(sequence), device=counts.device) - ends[sequence]
        pages = group.tables[sequence, index // group.page_size].long()
        queries = group.query_start_loc.tolist()
        lengths = {
            "cu_seqlens_q": group.query_start_loc - queries[0],
            "cu_seqlens_k": ends,
            "max_seqlen_q": max(end - begin for begin, end in pairwise(queries)),
            "max_seqlen_k": int(counts.max()),
        }
        rows = (index % group.page_size).long()
        return cls(pages, rows, lengths, queries[0], queries[-1])

    def is_long(self, least: int) -> bool:
        """Whether enough queries, which may be padded, see at least so many keys."""
        return len(self.rows) >= least and self.stop - self.first >= MIN_QUERIES


def attend_sequences(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    window: int | None,
    sinks: Tensor | None,
    library: Library,
    out: Tensor,
) -> None:
    """Write attention of the planned sequences, and zeros behind them, to ``out``.

    No version but the fourth knows sinks. But all return the logarithm of each
    softmax's sum: one more logit in it makes a factor sigmoid(lse - sink).
    """
    some = slice(plan.first, plan.stop)
    k, v = (x[plan.pages, plan.rows].to(q.dtype) for x in (keys, values))
    found, lse = library(q[some], k, v, window, **plan.lengths)
    if sinks is not None:
        found = found * torch.sigmoid(lse.T - sinks.float())[..., None]
    out[some] = found
    out[plan.stop :] = 0


def with_flash(
    attend: Callable[..., Tensor],
    library: Library,
    windows: Collection[int | None],
    least: int = 0,
) -> Callable[..., Tensor]:
    """`simplellm.model.ops.attend` whose prompts go through the library.

    ``attend`` does decodes, layers of other ``windows`` and what is captured in a
    graph: the library takes lengths that the host has to ask the GPU for. If ``least``
    isn't 0 it also does all but a step's only chunk, of at least `MIN_QUERIES` tokens,
    that sees at least so many keys, which are stored in the dtype of queries.
    """
    plans: WeakKeyDictionary[KVGroup, Plan] = WeakKeyDictionary()

    def attend_prompts(
        q: Tensor, keys: Tensor, values: Tensor, group: KVGroup, sinks: Tensor | None
    ) -> Tensor:
        decodes, rows = group.decodes, len(group.lengths)
        ours = group.queries > 1 or decodes == rows or group.window not in windows
        if least:
            few = len(q) - decodes < MIN_QUERIES or rows > decodes + 1
            ours = ours or few or keys.dtype != q.dtype
        if ours or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return attend(q, keys, values, group, sinks)
        chunks = group.chunks
        if (plan := plans.get(chunks)) is None:
            plan = plans[chunks] = Plan.of(chunks)
        if least and not plan.is_long(least):
            return attend(q, keys, values, group, sinks)
        out = torch.empty_like(q)
        if decodes:
            names = ("tables", "offsets", "lengths")
            first = {name: getattr(group, name)[:decodes] for name in names}
            first["query_start_loc"] = group.query_start_loc[: decodes + 1]
            mine = replace(group, **first)
            out[:decodes] = attend(q[:decodes], keys, values, mine, sinks)
        attend_sequences(q, keys, values, plan, group.window, sinks, library, out)
        return out

    return attend_prompts
