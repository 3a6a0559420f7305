"""What a GPU says of a kernel that is right: whether it gives the same bits each time,
and how long it takes beside PyTorch and beside what the machine allows.
"""

from collections.abc import Callable, Mapping

import torch

REPEATS = 20
# Bytes a second that they read and operations in bfloat16, as chapter 11 has them.
CARDS = {"H100": (3174e9, 797e12), "H200": (4650e9, 790e12)}
LAUNCH = 1.2e-6  # seconds


def assert_same_bits(launch: Callable[[], object], out: torch.Tensor) -> None:
    """``launch`` fills ``out``; from the same inputs always with the same bits."""
    found = []
    for _ in range(REPEATS):
        out.zero_()
        launch()
        found.append(out.clone().view(torch.uint8))
    other = sum(not torch.equal(bits, found[0]) for bits in found)
    assert not other, (
        f"the same inputs gave other bits in {other} of {REPEATS} runs on this GPU. Do "
        "two programs store to one place, or does one load what another one stores?"
    )


def race(
    launch: Callable[[], object],
    out: torch.Tensor,
    rivals: Mapping[str, Callable[[], object]],
    *,
    nbytes: float,
    flops: float = 0,
) -> dict[str, float]:
    """Seconds of the reader's kernel, its rivals and the roofline, told in a line.

    ``launch`` reads ``nbytes``, computes ``flops`` and fills ``out``. Each call begins
    with an L2 cache that has nothing of it. Raises AssertionError unless the bits are
    always the same.
    """
    from triton.testing import do_bench

    assert_same_bits(launch, out)
    ways = {"yours": launch, **rivals}
    seconds = {
        name: do_bench(call, return_mode="median") / 1e3 for name, call in ways.items()
    }
    gpu = torch.cuda.get_device_name()
    for card, (read, multiplied) in CARDS.items():
        if card in gpu:
            seconds["roofline"] = max(nbytes / read, flops / multiplied) + LAUNCH
    told = ", ".join(f"{name} {1e6 * s:,.1f}" for name, s in seconds.items())
    print(f"us on this {gpu}: {told}")
    return seconds
