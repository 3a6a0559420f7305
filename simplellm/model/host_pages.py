"""Pages of keys and values in the memory of the host."""

from torch import Tensor

from simplellm.base.host_memory import pinned

PIECE = 2**30  # bytes


def host_pages(page: Tensor, count: int) -> list[Tensor]:
    """So many like ``page`` of a device, which copies from and to them by itself."""
    # Pinned memory is rounded up to a power of two: large pieces leave little unused.
    each = max(1, PIECE // page.nbytes)
    sizes = [min(each, count - begin) for begin in range(0, count, each)]
    pieces = [pinned([n, *page.shape], page.dtype, page.device) for n in sizes]
    return [one for piece in pieces for one in piece]
