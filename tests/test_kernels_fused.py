"""Two layers on the table of kernels and on the plain one, from tokens to a draw."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from simplellm.checkpoint.mxfp4 import quantize
from simplellm.model.batch import Batch
from simplellm.model.kernels.triton_ops import triton_ops
from simplellm.model.layers import Attention, Experts, Layer
from simplellm.model.ops import PLAIN, Ops

HIDDEN, HEADS, KV_HEADS, DIM, VOCABULARY, PAGE = 96, 4, 2, 16, 50, 4
WINDOWS = None, 6
EPS = 1e-5


# What a table is made for
SHAPE = SimpleNamespace(
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    has_mxfp4=True,
)


class Model:
    """Random weights, and pages that keep what was computed."""

    def __init__(self, ops: Ops, device: str, norms: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device)

        self.ops = ops
        self.table = normal(VOCABULARY, HIDDEN)
        self.lm_head, self.norm = normal(VOCABULARY, HIDDEN), normal(HIDDEN)
        angles = torch.outer(torch.arange(64.0), 10000 ** -torch.arange(0, 1, 2 / DIM))
        width = (HEADS + 2 * KV_HEADS) * DIM
        self.layers = []
        for _ in WINDOWS:
            attn = Attention(
                qkv=normal(width, HIDDEN, scale=0.1),
                qkv_bias=normal(width),
                o=normal(HIDDEN, HEADS * DIM, scale=0.1),
                o_bias=normal(HIDDEN),
                sinks=normal(HEADS),
                q_norm=normal(DIM) if norms else None,
                k_norm=normal(DIM) if norms else None,
                cos=angles.cos().to(device),
                sin=angles.sin().to(device),
                head_dim=DIM,
                eps=EPS,
            )
            experts = Experts(
                router=normal(4, HIDDEN),
                router_bias=normal(4),
                gate_up=quantize(normal(4, 128, HIDDEN, scale=0.1)),
                gate_up_bias=normal(4, 128),
                down=quantize(normal(4, HIDDEN, 64, scale=0.1)),
                down_bias=normal(4, HIDDEN),
                top_k=2,
                limit=7.0,
                alpha=1.702,
            )
            layer = Layer(normal(HIDDEN), attn, normal(HIDDEN), experts)
            self.layers.append(ops.prepare(layer))
        shape = (len(WINDOWS), 2, 16, PAGE, KV_HEADS, DIM)
        self.pages = torch.full(shape, torch.nan, device=device)

    def __call__(self, batch: Batch, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [T, hidden], normed, and logits [S, V] of the samples."""
        ops = self.ops
        x, update = ops.embed(batch.tokens, previous, self.table), None
        layers = zip(self.layers, self.pages, batch.groups, strict=True)
        for layer, (keys, values), group in layers:
            x, h = ops.add_norm(x, update, layer.attn_norm, EPS)
            qkv = ops.project(h, layer.attn.qkv, None)
            q = ops.rope_and_cache(
                qkv, layer.attn, batch.positions, keys, values, group.slots
            )
            out = ops.attend(q, keys, values, group, layer.attn.sinks)
            update = ops.project(out.flatten(1), layer.attn.o, layer.attn.o_bias)
            x, h = ops.add_norm(x, update, layer.mlp_norm, EPS)
            update = layer.mlp.forward(ops, h, batch.num_tokens)
        hidden = ops.add_norm(x, update, self.norm, EPS)[1]
        logits = hidden.new_empty(len(batch.logits_indices), VOCABULARY)
        best = ops.head(hidden[batch.logits_indices], self.lm_head, logits)
        assert torch.equal(best.long(), logits.argmax(-1))
        return hidden, logits


def make_batch(
    device: str,
    chunks: Sequence[tuple[Sequence[int], int]],
    padding: int = 0,
    gap: int = 0,
    windows: tuple[int | None, ...] = WINDOWS,
) -> Batch:
    """``chunks`` are tokens and the position of the first; decodes come first.

    Sequence i has page 4 * i and the next ones; the last ``padding`` tokens are none,
    nor are ``gap`` rows after the decodes and as many after the others.
    """
    total = sum(len(tokens) for tokens, _ in chunks) + padding
    pages, rows = 4, len(chunks) + 2 * gap
    size = Batch.size(total, rows, pages, len(windows))
    flat = torch.zeros(size, dtype=torch.int32)
    real = sum(len(tokens) == 1 for tokens, _ in chunks)
    decodes = real + gap
    batch = Batch.of(flat, total, rows, pages, decodes, windows, PAGE)
    batch.pad()
    begin = 0
    for number, (tokens, position) in enumerate(chunks):
        row = number if number < real else number + gap
        end = begin + len(tokens)
        batch.tokens[begin:end] = torch.tensor(tokens)
        places = torch.arange(position, position + len(tokens))
        batch.positions[begin:end] = places
        batch.lengths[row] = position + len(tokens)
        batch.query_start_loc[row + 1 :] = end
        batch.logits_indices[number] = end - 1
        for group in batch.groups:
            group.tables[row] = number * pages + torch.arange(pages)
            group.slots[begin:end] = number * pages * PAGE + places
        begin = end
    flat = flat.to(device)
    return Batch.of(flat, total, rows, pages, decodes, windows, PAGE)


def run(model: Model, device: str, *steps: Batch) -> list[Tensor]:
    """The hidden states of each step, without padding."""
    previous = torch.tensor([7, 8], dtype=torch.int32, device=device)
    found = [(model(step, previous), int(step.num_tokens)) for step in steps]
    return [hidden[:num_tokens] for (hidden, _), num_tokens in found]


@pytest.mark.parametrize(
    "norms", [pytest.param(False, marks=pytest.mark.exhaustive), True]
)
def test_both_tables_compute_the_same(kernel_device, norms):
    steps = [
        make_batch(kernel_device, [(range(9), 0), (range(20, 25), 0)], padding=3),
        make_batch(kernel_device, [([-2], 9), (range(30, 37), 5)]),
        make_batch(kernel_device, [([3], 10), ([-1], 12)], padding=1),
    ]
    device = torch.device(kernel_device)
    table = triton_ops(SHAPE, max_num_seqs=2, device=device)
    kernels = run(Model(table, kernel_device, norms), kernel_device, *steps)
    plain = run(Model(PLAIN, kernel_device, norms), kernel_device, *steps)
    for got, expected in zip(kernels, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "batch_invariant", [pytest.param(False, marks=pytest.mark.exhaustive), True]
)
def test_a_padded_step_computes_what_the_real_one_does(kernel_device, batch_invariant):
    """A captured step has room for more tokens, decodes and chunks."""
    steps = [
        [(range(9), 0), (range(20, 25), 0)],
        [([-2], 9), (range(30, 37), 5)],
    ]
    device = torch.device(kernel_device)
    found = []
    for padding, gap in ((0, 0), (5, 3)):
        table = triton_ops(
            SHAPE, max_num_seqs=5, device=device, batch_invariant=batch_invariant
        )
        batches = [make_batch(kernel_device, step, padding, gap) for step in steps]
        found.append(run(Model(table, kernel_device), kernel_device, *batches))
    for padded, real in zip(*found, strict=True):
        torch.testing.assert_close(padded, real, rtol=1e-3, atol=1e-3)
        assert torch.equal(padded, real) or not batch_invariant


@pytest.mark.bits
def test_a_token_has_the_same_bits_in_any_company(kernel_device):
    device = torch.device(kernel_device)

    def hidden(*steps: Batch) -> list[Tensor]:
        table = triton_ops(SHAPE, max_num_seqs=2, device=device, batch_invariant=True)
        return run(Model(table, kernel_device), kernel_device, *steps)

    tokens, other = list(range(9)), list(range(20, 33))
    alone = hidden(make_batch(kernel_device, [(tokens, 0)]))[0]
    both = hidden(make_batch(kernel_device, [(tokens, 0), (other, 0)], padding=2))[0]
    assert torch.equal(both[:9], alone)
    pieces = hidden(
        make_batch(kernel_device, [(tokens[:5], 0)]),
        make_batch(kernel_device, [(tokens[5:8], 5), (other, 0)]),
        make_batch(kernel_device, [(tokens[8:], 8), (other[:4], 0)]),
    )
    parts = [pieces[0], pieces[1][:3], pieces[2][:1]]
    assert torch.equal(torch.cat(parts), alone)


def test_what_a_table_holds():
    for batch_invariant in (False, True):
        table = triton_ops(
            SHAPE,
            max_num_seqs=3,
            device=torch.device("meta"),
            batch_invariant=batch_invariant,
        )
        same = {
            name
            for name, function in vars(table).items()
            if function is getattr(PLAIN, name)
        }
        # For one process alone these are PyTorch's, or nothing.
        assert same == {"argmax", "reduce", "score"}
