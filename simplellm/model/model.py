"""The transformer: layers as records, and one forward pass over a record of operations.

T packed tokens, S of them sampling, V vocabulary, D head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.model.batch import Batch
from simplellm.model.kv_pool import KVPool
from simplellm.model.layers import Layer, Norm
from simplellm.model.memory import check_room, page_bytes
from simplellm.model.one_sequence import PAGE, check_tokens, one_sequence
from simplellm.model.ops import Ops

CHUNK = 2048  # tokens of a sequence that `Model.logits` computes at once


@dataclass(eq=False, repr=False)
class Model:
    """A model's weights, and the operations that compute with them."""

    config: ModelConfig
    ops: Ops
    _: KW_ONLY
    embed_tokens: Tensor  # [V, hidden]
    layers: Sequence[Layer]
    norm: Norm
    lm_head: Weight  # [V, hidden]
    # What a family does with the embedded tokens [T, hidden], given their positions.
    embed_transform: Callable[[Tensor, Tensor], Tensor] = lambda x, positions: x

    def __post_init__(self) -> None:
        self.device, self.dtype = self.embed_tokens.device, self.embed_tokens.dtype

    def forward(self, batch: Batch, pool: KVPool, previous: Tensor) -> Tensor:
        """Hidden states [T, hidden], normed, of the tokens of ``batch``.

        Their keys and values are written to ``pool``. ``previous``, int32, holds the
        tokens that the step before has sampled.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        x = ops.embed(batch.tokens, previous, self.embed_tokens)
        x, update = self.embed_transform(x, batch.positions), None
        for index, layer in enumerate(self.layers):
            attn, group = layer.attn, batch.groups[pool.groups[index]]
            keys, values = pool.keys[index], pool.values[index]
            x, h = ops.add_norm(x, update, layer.attn_norm, eps)
            qkv = ops.project(h, attn.qkv, None)  # [T, (H+2K)*D], or in parts
            q = ops.rope_and_cache(
                qkv, attn, batch.positions, keys, values, group.slots
            )
            out = ops.attend(q, keys, values, group, attn.sinks)  # [T, H, D]
            update = ops.reduce(ops.project(out.flatten(1), attn.o, attn.o_bias))
            x, h = ops.add_norm(x, update, layer.mlp_norm, eps)
            update = ops.reduce(layer.mlp.forward(ops, h, batch.num_tokens))
        return ops.add_norm(x, update, self.norm, eps)[1]

    def head(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """The likeliest next token of each row of ``hidden`` [S, hidden]: int32 [S].

        Fills ``logits``, float32 [S, V], as well.
        """
        return self.ops.head(hidden, self.lm_head, logits)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """float32 logits [T, V] of one sequence: row t scores the token after t.

        Raises TypeError or ValueError for what is no sequence that the model can read,
        and MemoryError or torch.OutOfMemoryError, before it computes anything, if the
        logits and the keys and values do not fit.
        """
        tokens = torch.as_tensor(token_ids)
        check_tokens(tokens, self.config)
        count, windows = len(tokens), self.config.windows
        pages = -(-count // PAGE)  # for each of the windows
        num_pages = pages * len(windows)
        nbytes = num_pages * page_bytes(self.config, PAGE, self.dtype.itemsize)
        nbytes += 4 * count * self.config.vocab_size
        check_room(self.device, nbytes, f"the logits of {count} tokens")
        pool = KVPool(self.config, num_pages, PAGE, self.dtype, self.device)
        logits = torch.empty(count, self.lm_head.shape[0], device=self.device)
        previous = torch.zeros(1, dtype=torch.int32, device=self.device)
        for start in range(0, count, CHUNK):
            stop = min(start + CHUNK, count)
            chunk = tokens[start:stop]
            batch = one_sequence(chunk, start, pages, windows, self.device)
            hidden = self.forward(batch, pool, previous)
            self.head(hidden, logits[start:stop])
        return logits
