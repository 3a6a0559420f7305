"""The whole forward pass on fused kernels, from token ids to hidden states.

T packed tokens, B sequences, S of them sampling, P pages in a row of a table, H query
heads, K kv heads, D head_dim.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm import layers, ops
from simplellm.graphs import Step
from simplellm.kernels.attention import Scratch, attend, paged_prefill_torch
from simplellm.kernels.compiling import compile_in_threads, hash_kernels
from simplellm.kernels.experts import experts
from simplellm.kernels.fallback import Fallback
from simplellm.kernels.fragments import repack
from simplellm.kernels.head import head
from simplellm.kernels.linear import project
from simplellm.kernels.norm import add_norm, add_norm_torch
from simplellm.kernels.rope import rope_and_cache, rope_and_cache_torch
from simplellm.kernels.sampling import draw, draw_torch
from simplellm.model import TORCH, Attention, Block, MoE, Transformer
from simplellm.moe import Experts
from simplellm.paged import PagedCache
from simplellm.sampler import Columns
from simplellm.weights import MXFP4

Launcher = Callable[..., Any]


@triton.jit
def embed_kernel(
    tokens_ptr, previous_ptr, table_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t] = table[token], where token -1 - i is previous[i]."""
    row = tl.program_id(0)
    token = tl.load(tokens_ptr + row)
    if token < 0:
        token = tl.load(previous_ptr - 1 - token)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(table_ptr + token.to(tl.int64) * N + columns, inside)
    tl.store(out_ptr + row * N + columns, x, inside)


def embed(tokens: Tensor, previous: Tensor, table: Tensor) -> Tensor:
    """The rows of ``table`` [V, N] of int32 tokens [T]; -1 - i means previous[i].

    The caller answers for tokens being in the table, or in ``previous``, int32. Raises
    ValueError for other dtypes, and for tensors that are not contiguous.
    """
    for name, ids in (("tokens", tokens), ("previous", previous)):
        if ids.dtype != torch.int32 or ids.ndim != 1 or not ids.is_contiguous():
            raise ValueError(
                f"{name} are {ids.dtype} {list(ids.shape)}; expected torch.int32 "
                "[length], contiguous"
            )
    if table.ndim != 2 or not table.is_contiguous():
        raise ValueError(f"table is {list(table.shape)}; expected [V, N], contiguous")
    out = table.new_empty(len(tokens), table.shape[1])
    block = triton.next_power_of_2(table.shape[1])
    embed_kernel[(len(tokens),)](
        tokens, previous, table, out, N=table.shape[1], BLOCK=block, num_warps=4
    )
    return out


def embed_torch(tokens: Tensor, previous: Tensor, table: Tensor) -> Tensor:
    known = torch.where(tokens < 0, previous[(-1 - tokens).clamp(min=0)], tokens)
    return table[known]


def attend_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    queries: Tensor,
    decodes: int,
    sinks: Tensor | None,
    window: int | None,
    *,
    scratch: Scratch | None = None,
) -> Tensor:
    return paged_prefill_torch(
        q, keys, values, tables, offsets, lengths, queries, sinks, window
    )


class Kernels:
    """What the forward pass launches, each kernel with its twin behind it.

    With ``batch_invariant`` none has a twin, since PyTorch promises no order of sums:
    what does not compile is raised.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        def kernel(launcher: Launcher, twin: Launcher) -> Launcher:
            return launcher if batch_invariant else Fallback(launcher, twin)

        def ordered(launcher: Launcher, twin: Launcher) -> Launcher:
            if batch_invariant:
                return partial(launcher, batch_invariant=True)
            return Fallback(launcher, twin)

        self.embed = kernel(embed, embed_torch)
        self.add_norm = kernel(add_norm, add_norm_torch)
        self.project = ordered(project, ops.project)
        self.rope_and_cache = kernel(rope_and_cache, rope_and_cache_torch)
        self.attend = ordered(attend, attend_torch)
        # Repacked weights have no twin.
        self.experts = partial(experts, batch_invariant=batch_invariant)
        self.head = ordered(head, ops.head)
        self.draw = kernel(draw, draw_torch)


class Fused:
    """The weights of a loaded `Transformer`, computed with in fused kernels.

    Its experts must have been repacked. With ``batch_invariant`` a token goes through
    the same kernels in the same way whatever else is in a step, so that its hidden
    state and its logits have the same bits.
    """

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        max_num_seqs: int,
        batch_invariant: bool = False,
    ) -> None:
        config = model.config
        self.vocab_size = config.vocab_size
        hash_kernels()
        self.kernels = Kernels(batch_invariant)
        self.model, self.cache = model, cache
        self.batch_invariant = batch_invariant
        self.layers = cast(list[Block], list(model.layers))
        self.mlps = [experts_of(layer.mlp) for layer in self.layers]
        self.device = model.device
        positions = torch.arange(config.max_position_embeddings, device=model.device)
        self.cos, self.sin = model.rope.cos_sin(positions)  # float32 [positions, D/2]
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scratch = Scratch.create(
            max_num_seqs, heads, kv_heads, config.head_dim, model.device
        )

    def compile(self, steps: Iterable[Callable[[], object]]) -> None:
        """Do ``steps``, several at once, so that the kernels they need are compiled."""
        if self.device.type == "cuda":
            # A thread begins on the first GPU.
            compile_in_threads(steps, partial(torch.cuda.set_device, self.device))
            # What each thread had cuBLAS work in would stay.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def __call__(self, step: Step, previous: Tensor) -> Tensor:
        """Hidden states [T, hidden], normed, of the tokens of ``step``.

        ``previous`` int32 holds the tokens that the step before has sampled.
        """
        model, eps = self.model, self.model.config.rms_norm_eps
        add_norm = self.kernels.add_norm
        x = self.kernels.embed(step.tokens, previous, model.embed_tokens)
        update, live = None, step.queries[-1:]
        for index, layer in enumerate(self.layers):
            x, h = add_norm(x, update, layer.attn_norm.weight, eps)
            update = self.attention(layer.attn, h, step, index)
            x, h = add_norm(x, update, layer.mlp_norm.weight, eps)
            update = self.kernels.experts(h, self.mlps[index], live)
        return add_norm(x, update, model.norm.weight, eps)[1]

    def attention(self, attn: Attention, h: Tensor, step: Step, layer: int) -> Tensor:
        group, place = self.cache.places[layer]
        where = step.groups[group]
        keys, values = self.cache.k[place], self.cache.v[place]
        qkv = self.kernels.project(h, attn.qkv.weight, None)  # [T, (H+2K)*D], or parts
        q = self.kernels.rope_and_cache(
            qkv,
            attn.qkv.bias,
            step.positions,
            self.cos,
            self.sin,
            keys,
            values,
            where.slots,
        )  # [T, H, D]
        out = self.kernels.attend(
            q,
            keys,
            values,
            where.tables,
            where.offsets,
            step.lengths,
            step.queries,
            step.decodes,
            attn.sinks,
            attn.window,
            scratch=self.scratch,
        )
        return self.kernels.project(out.flatten(1), attn.o.weight, attn.o.bias)

    def head(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """The likeliest next token of each row, int32; fills ``logits`` as well."""
        return self.kernels.head(hidden, self.model.lm_head.weight, logits)

    def draw(
        self, logits: Tensor, best: Tensor, columns: Columns, steps: Tensor
    ) -> Tensor:
        """A token drawn from each row, int32; ``best`` are the likeliest ones."""
        heat = columns.temperature[:, 0]
        return self.kernels.draw(logits, best, heat, columns.seeds, steps)


def experts_of(mlp: MoE) -> layers.Experts:
    """The record of one layer's experts."""
    weights = mlp.experts
    return layers.Experts(
        mlp.router_weight,
        mlp.router_bias,
        weights.gate_up,
        weights.gate_up_bias,
        weights.down,
        weights.down_bias,
        mlp.top_k,
        weights.limit,
        weights.alpha,
    )


def prepare(weights: Experts) -> Experts:
    """The experts in the order that the kernels read; nothing of the original stays."""
    if not isinstance(weights.gate_up, MXFP4) or not isinstance(weights.down, MXFP4):
        raise TypeError("the experts are dense; expected MXFP4")
    first = repack(weights.gate_up, paired=True)
    second = repack(weights.down, paired=False)
    return replace(weights, gate_up=first, down=second)  # type: ignore[arg-type]


# The model's own forward pass does not know repacked experts; `Fused` does.
FUSED = replace(TORCH, prepare=prepare)
