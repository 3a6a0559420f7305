"""Several GPUs: two products on two ranks, and the one sum behind them."""

from drawings.svg import BLUE, GREEN, MARGIN, ORANGE, PURPLE, VERMILION, Drawing

TALL, TOPS = 48, (54, 158)  # of a rank's row


def columns() -> Drawing:
    """A feed-forward network cut by outputs, then by inputs."""
    d = Drawing("Two cuts, one sum", 0)
    reduce = d.box(544, TOPS[0], 84, TOPS[1] + TALL - TOPS[0], "all-reduce", "adds up")
    for rank, top in enumerate(TOPS):
        color = (BLUE, ORANGE)[rank]
        d.text(MARGIN, top - 16, f"rank {rank}", bold=True)
        row = [
            d.box(MARGIN, top, 52, TALL, "x", "all of it", color=GREEN),
            d.box(
                106, top, 130, TALL, "first weight", ("upper", "lower")[rank] + " rows",
                color=color,
            ),
            d.box(266, top, 92, TALL, "activation", "of its half", color=VERMILION),
            d.box(
                388, top, 126, TALL, "second weight",
                ("left", "right")[rank] + " columns", color=color,
            ),
        ]  # fmt: skip
        for before, after in zip(row, [*row[1:], reduce], strict=True):
            d.arrow((before.right, before.cy), (after.x, before.cy))
        y = d.box(650, top, 26, TALL, "y", color=PURPLE)
        d.arrow((reduce.right, y.cy), (y.x, y.cy))
    d.height = d.prose(
        MARGIN,
        TOPS[1] + TALL + 26,
        "Of the first weight, [out, in], a rank has half of the rows: it computes half "
        "of the intermediate numbers, whole. Of the second it has the columns that "
        "want just these. Each result is a part of a sum, for every number of y.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"e-columns": columns()}
