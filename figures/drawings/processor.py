"""One processor of an H200, and the memories behind it."""

from course import recorded

from drawings.svg import (
    BLUE,
    EDGE,
    GREEN,
    MARGIN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WHITE,
    WIDTH,
    Box,
    Drawing,
)

# Of a processor of compute capability 9.0: CUDA C++ Programming Guide, "Compute
# Capabilities", and NVIDIA's Hopper Tuning Guide. The L2 cache is what CUDA reports.
PARTITIONS = 4
WARPS = 64  # that can be there at a time
REGISTER_BYTES = 65_536 * 4
LANES = 128
L1_KB = 256
SHARED_KB = 227  # of that, at most for one program
L2_MB = 60


def processor() -> Drawing:
    """What a program finds on its processor, and where its numbers come from."""
    device, kernels = recorded("12-profile")["device"], recorded("11-kernels")
    count = device["multiprocessors"]
    d = Drawing("One processor of an H200, and the memory behind it", 0)
    d.heading(MARGIN, 34, f"one of {count} processors")
    outer = d.panel(MARGIN, 52, WIDTH - 2 * MARGIN, 284, fill="#f8f9fb", edge=EDGE)
    pitch, wide = 158, 148
    kilobytes = REGISTER_BYTES // PARTITIONS // 1024
    parts = (
        ("warp scheduler", f"holds {WARPS // PARTITIONS} warps", PURPLE),
        (f"registers: {kilobytes} KB", "each thread's own", GREEN),
        (f"{LANES // PARTITIONS} lanes", "one warp at a time", SKY),
        ("tensor core", "small products only", VERMILION),
    )
    for part in range(PARTITIONS):
        x = outer.x + 15 + pitch * part
        d.panel(x, 66, wide, 190, fill=WHITE, edge=EDGE)
        for row, (name, what, color) in enumerate(parts):
            y = 74 + 44.5 * row
            d.box(x + 8, y, wide - 16, 40, name, what, color=color, size=12)
    d.box(
        outer.x + 15,
        268,
        outer.w - 30,
        54,
        f"L1 cache and shared memory: {L1_KB} KB",
        f"a program's threads share up to {SHARED_KB} KB of it",
        color=BLUE,
        size=13,
    )

    def level(y: float, name: str, what: str, color: str) -> Box:
        return d.box(
            MARGIN, y, WIDTH - 2 * MARGIN, 50, name, what, color=color, size=13
        )

    cache = level(
        372, f"L2 cache: {L2_MB} MB", f"one for all {count} processors", ORANGE
    )
    gib = device["memory_bytes"] / 2**30
    memory = level(
        458,
        f"memory: {gib:.0f} GiB",
        f"weights, keys and values; read at up to {kernels['bandwidth']:,} GB/s, "
        "measured",
        EDGE,
    )
    for x in (250, 350, 450):
        d.arrow((x, outer.bottom), (x, cache.y), both=True)
        d.arrow((x, cache.bottom), (x, memory.y), both=True)
    d.height = d.prose(
        MARGIN,
        534,
        "A program of a Triton kernel runs on one processor, as 1 to 32 warps of "
        "32 threads. A processor holds several programs, as many as registers and "
        "shared memory allow: while one waits for memory, another computes.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"11-processor": processor()}
