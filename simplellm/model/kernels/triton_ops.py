"""The table of operations whose every step is a Triton kernel."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.model.kernels.attention import attend
from simplellm.model.kernels.decode import Scratch
from simplellm.model.kernels.draw import draw
from simplellm.model.kernels.experts import experts as packed_experts
from simplellm.model.kernels.grouped import experts
from simplellm.model.kernels.norm import add_norm, embed
from simplellm.model.kernels.other_families import dense, prepare
from simplellm.model.kernels.penalties import penalize
from simplellm.model.kernels.rope import rope_and_cache
from simplellm.model.kernels.scaled_linear import head, project
from simplellm.model.ops import Ops


def attend_in(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    device: torch.device,
    batch_invariant: bool = False,
) -> Callable[..., Tensor]:
    """`attend` for heads of this shape, with room for so many ``rows`` of decodes."""
    scratch = Scratch.create(rows, heads, kv_heads, dim, device)
    return partial(attend, scratch=scratch, batch_invariant=batch_invariant)


def triton_ops(
    config: ModelConfig,
    *,
    max_num_seqs: int,
    device: torch.device,
    batch_invariant: bool = False,
    fp8: bool = False,
) -> Ops:
    """The operations for models of this shape, with up to ``max_num_seqs`` decodes.

    `kernels.compiling` finds out which of them compile. With ``batch_invariant`` a
    token goes through the same kernels in the same way whatever else is in a step, so
    that its hidden state and its logits have the same bits. With ``fp8`` packed experts
    round what they multiply.
    """
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return Ops(
        name="Triton",
        embed=embed,
        add_norm=add_norm,
        project=partial(project, batch_invariant=batch_invariant),
        rope_and_cache=rope_and_cache,
        attend=attend_in(max_num_seqs, *heads, device, batch_invariant),
        experts=partial(packed_experts, batch_invariant=batch_invariant, fp8=fp8)
        if config.has_mxfp4
        else partial(experts, batch_invariant=batch_invariant),
        dense=partial(dense, batch_invariant=batch_invariant),
        head=partial(head, batch_invariant=batch_invariant),
        draw=draw,
        penalize=penalize,
        prepare=partial(prepare, fp8=fp8),
    )
