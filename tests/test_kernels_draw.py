"""Drawing tokens: the kernel against the operation and against the definition."""

import pytest
import torch

from simplellm.base.noise import gumbel_noise
from simplellm.model import ops
from simplellm.model.kernels.draw import DRAW_BLOCK, draw


def inputs(device, rows, vocabulary, temperature=1.0):
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    steps = torch.randint(0, 2**20, (rows,), generator=generator)
    temperature = torch.full((rows,), temperature)
    best = logits.argmax(-1).int()
    return [tensor.to(device) for tensor in (logits, best, temperature, seeds, steps)]


def sampled(logits, temperature, seeds, steps):
    """Gumbel-max as it is defined: the best of logits over temperature plus noise."""
    scores = logits - logits.amax(-1, keepdim=True)
    scores = scores / torch.where(temperature > 0, temperature, 1.0)[:, None]
    noise = gumbel_noise(seeds, steps, logits.shape[1])
    return (scores + noise * (temperature > 0)[:, None]).argmax(-1)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("vocabulary", [7, 2 * DRAW_BLOCK, 2 * DRAW_BLOCK + 1])
def test_draw_is_what_the_definition_says(kernel_device, vocabulary, temperature):
    logits, best, temperature, seeds, steps = inputs(
        kernel_device, 5, vocabulary, temperature
    )
    expected = sampled(logits, temperature, seeds, steps)
    assert torch.equal(draw(logits, best, temperature, seeds, steps).long(), expected)
    assert torch.equal(
        ops.draw(logits, best, temperature, seeds, steps).long(), expected
    )


def test_steps_and_seeds_matter_in_all_their_bits(kernel_device):
    logits = torch.zeros(65, DRAW_BLOCK, device=kernel_device)
    best, steps = torch.zeros_like(logits[:, 0]).int(), torch.zeros(65).long()
    temperature, steps = torch.ones(65, device=kernel_device), steps.to(kernel_device)
    bits = torch.tensor([0] + [1 << bit for bit in range(63)] + [-(2**63)])
    seeds = bits.to(kernel_device)
    tokens = draw(logits, best, temperature, seeds, steps)
    assert torch.equal(tokens, ops.draw(logits, best, temperature, seeds, steps))
    assert len(set(tokens.tolist())) > 60
    moved = draw(
        logits, best, temperature, seeds * 0, steps + torch.arange(65).to(steps)
    )
    assert len(set(moved.tolist())) > 60


def test_rows_at_temperature_0_get_their_best(kernel_device):
    logits, best, temperature, seeds, steps = inputs(kernel_device, 4, 100)
    temperature[::2] = 0
    tokens = draw(logits, best, temperature, seeds, steps)
    assert torch.equal(tokens[::2], best[::2])
    assert torch.equal(tokens.long(), sampled(logits, temperature, seeds, steps))


def test_a_tiny_temperature_does_not_overflow(kernel_device):
    logits, best, temperature, seeds, steps = inputs(kernel_device, 3, 100, 1e-38)
    assert torch.equal(draw(logits, best, temperature, seeds, steps), best)


def test_what_is_impossible_is_never_drawn(kernel_device):
    logits = torch.full((50, 300), -torch.inf, device=kernel_device)
    logits[:, [5, 290]] = 0
    _, _, temperature, seeds, steps = inputs(kernel_device, 50, 300)
    best = torch.full((50,), 5, dtype=torch.int32, device=kernel_device)
    assert set(draw(logits, best, temperature, seeds, steps).tolist()) == {5, 290}
