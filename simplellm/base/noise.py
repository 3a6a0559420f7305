"""Random numbers as a function: what is drawn depends on nothing but its own row.

B rows, V vocabulary.
"""

import torch
from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit values held in int64.

    A bijection in which each input bit flips each output bit about half the time: the
    shift-multiply hash of Ettinger's hash-prospector with 15 bits as its second shift.
    Its constants are below 2^31, so no product overflows int64: the same bits on every
    device.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def gumbel_noise(
    seeds: Tensor, steps: Tensor, vocab_size: int, start: int = 0
) -> Tensor:
    """Standard Gumbel noise that is a function of (seed, step, token), not a stream.

    A row's step is how many tokens of output it has so far.

    seeds int64 [B] (all 64 bits count) and steps int64 [B] -> float32 [B, V]. Counter
    based as in Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". For
    V tokens from ``start`` on.
    """
    low, high = seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF
    first = mix(mix(mix(low) ^ high) ^ steps)  # [B]
    second = mix(first ^ 0x5BD1E995)  # two keys a row: rows never share a sequence
    tokens = torch.arange(start, start + vocab_size, device=seeds.device)
    bits = mix(mix(tokens ^ first[:, None]) ^ second[:, None])  # [B, V]
    # Midpoints of 2^32 intervals; float32 would round the last 128 of them up to 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    # -log(1 - u) is exponential; log1p keeps its small values (the winners) sharp.
    return -torch.log(-torch.log1p(-uniform))
