"""gpt-oss-120b with its shapes and bytes, and a request's way through the engine."""

import math
from typing import Any

from drawings.svg import (
    BLUE,
    GREEN,
    INK,
    LINE,
    MARGIN,
    MUTED,
    ORANGE,
    PURPLE,
    SMALL,
    VERMILION,
    WHITE,
    WIDTH,
    Drawing,
    mix,
    shade,
    tint,
)
from simplellm.base.config import ModelConfig
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_120B
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.checkpoint.names import is_expert_weight, packed_shapes, tensor_shapes
from simplellm.model.memory import position_bytes

SMALL_MODEL = read_config(EMBEDDED / "config.json")


def size(nbytes: float) -> str:
    """Three digits and a unit."""
    units = ["B", "kB", "MB", "GB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" or nbytes >= 99.95 else 2 if nbytes < 9.995 else 1
    return f"{nbytes:.{digits}f} {units[0]}"


def file_bytes(config: ModelConfig) -> dict[str, int]:
    """What each tensor takes in the file, by our name: MXFP4 for the experts, else
    bfloat16."""
    return {
        ours: sum(map(math.prod, packed_shapes(shape)))
        if is_expert_weight(ours)
        else 2 * math.prod(shape)
        for ours, shape in tensor_shapes(config).items()
    }


def token_bytes(config: ModelConfig) -> dict[str, int]:
    """What of each tensor one token needs: its row, its experts, or all."""
    found = file_bytes(config)
    for ours in found:
        if ours.startswith("embed"):
            found[ours] //= config.vocab_size
        elif ".experts." in ours:
            found[ours] *= config.num_experts_per_tok
            found[ours] //= config.num_local_experts
    return found


# In a layer: what it does, the weight, and its bias if it has one.
LAYER = (
    ("RMSNorm", "attn_norm.weight", None, ORANGE),
    ("queries, keys, values", "attn.qkv.weight", "attn.qkv.bias", VERMILION),
    ("attention with a sink", "attn.sinks", None, VERMILION),
    ("output", "attn.o.weight", "attn.o.bias", VERMILION),
    ("RMSNorm", "mlp_norm.weight", None, ORANGE),
    ("router", "router.weight", "router.bias", BLUE),
    ("gate and up", "experts.gate_up", "experts.gate_up_bias", BLUE),
    ("down", "experts.down", "experts.down_bias", BLUE),
)
PITCH = 34
SHAPE, BYTES, READS, SMALLER = 250, 452, 552, WIDTH - MARGIN


def model() -> Drawing:
    """Each part of the model with its weight's shape and bytes."""
    big, small = tensor_shapes(GPT_OSS_120B), tensor_shapes(SMALL_MODEL)
    stored, read = file_bytes(GPT_OSS_120B), token_bytes(GPT_OSS_120B)
    layers = GPT_OSS_120B.num_hidden_layers
    d = Drawing("gpt-oss-120b: its parts, their shapes and bytes", 660)

    d.heading(MARGIN, 34, "gpt-oss-120b")
    d.text(SHAPE, 34, "weight", size=SMALL, color=MUTED)
    d.text(BYTES, 34, "in the file", size=SMALL, color=MUTED, anchor="end")
    d.text(READS, 34, "a token reads", size=SMALL, color=MUTED, anchor="end")
    d.text(SMALLER, 34, "embedded model", size=SMALL, color=MUTED, anchor="end")

    def row(y: float, string: str, color: str, *names: str | None) -> None:
        weight, *bias = (name for name in names if name)
        box = d.box(64, y, 172, 26, string, color=color)
        options: dict[str, Any] = {"size": SMALL, "mono": True}
        d.text(SHAPE, box.cy, str(list(big[weight])), **options)
        options["anchor"] = "end"
        for x, sizes in ((BYTES, stored), (READS, read)):
            nbytes = sum(sizes[name] for name in (weight, *bias))
            d.text(x, box.cy, size(nbytes), **options)
        d.text(SMALLER, box.cy, str(list(small[weight])), color=MUTED, **options)

    row(54, "embedding", GREEN, "embed_tokens.weight")
    top = 92
    panel = d.panel(14, top, WIDTH - 28, 62 + PITCH * len(LAYER) + 6)
    d.text(64, top + 18, f"one of {layers} layers", bold=True)
    sliding = f"sliding (last {GPT_OSS_120B.sliding_window}) and full in turn"
    d.text(SHAPE, top + 18, f"attention: {sliding}", size=SMALL, color=MUTED)
    layer_count = SMALL_MODEL.num_hidden_layers
    d.text(
        SMALLER,
        top + 18,
        f"{layer_count} layers",
        size=SMALL,
        color=MUTED,
        anchor="end",
    )
    first = top + 36
    for i, (string, weight, bias, color) in enumerate(LAYER):
        names = (f"layers.0.{name}" if name else None for name in (weight, bias))
        row(first + PITCH * i, string, color, *names)
    total = first + PITCH * len(LAYER) + 13
    in_layer = [name for name in stored if name.startswith("layers.0.")]
    d.text(SHAPE, total, "one layer", size=SMALL, bold=True)

    def sums(y: float, names: list[str]) -> None:
        for x, sizes in ((BYTES, stored), (READS, read)):
            value = size(sum(sizes[name] for name in names))
            d.text(x, y, value, size=SMALL, mono=True, bold=True, anchor="end")

    sums(total, in_layer)
    below = panel.bottom + 12
    row(below, "RMSNorm", ORANGE, "norm.weight")
    row(below + PITCH, "head: logits", GREEN, "lm_head.weight")

    # The residual stream.
    stream = 40

    def plus(y: float) -> None:
        d.dot(stream, y, 8, WHITE)
        d.body.append(
            f'<circle cx="{stream}" cy="{y}" r="7.5" fill="{WHITE}" stroke="{LINE}"/>'
        )
        d.body.append(
            f'<path d="M{stream - 4} {y}h8M{stream} {y - 4}v8" stroke="{INK}"/>'
        )

    d.line((64, 67), (stream, 67), (stream, below + 13), (64, below + 13), width=2)
    for norm in (0, 4):
        start = first + PITCH * norm - 6
        d.arrow((stream, start), (52, start), (52, start + 19), (64, start + 19))
    for last in (3, 7):
        y = first + PITCH * last + 13
        d.arrow((64, y), (stream + 8, y))
        plus(y)
    for i in (0, 1, 2, 4, 5, 6):
        d.arrow((150, first + PITCH * i + 26), (150, first + PITCH * (i + 1)))
    d.arrow((150, below + 26), (150, below + PITCH))

    # Totals.
    bottom = below + 2 * PITCH + 18
    d.line((64, bottom - 10), (WIDTH - MARGIN, bottom - 10), width=1)
    d.text(64, bottom + 8, "the whole model", bold=True)
    sums(bottom + 8, list(stored))
    d.text(
        SMALLER,
        bottom + 8,
        size(sum(file_bytes(SMALL_MODEL).values())),
        size=SMALL,
        mono=True,
        anchor="end",
        color=MUTED,
    )
    position = position_bytes(GPT_OSS_120B, 2)
    chosen, experts = GPT_OSS_120B.num_experts_per_tok, GPT_OSS_120B.num_local_experts
    d.height = d.prose(
        64,
        bottom + 34,
        f"A token reads one row of the embedding and {chosen} of {experts} experts, "
        "and all of the rest. Experts are stored in MXFP4, 4.25 bits per weight, "
        "everything else in 16 bits; biases are counted. Keys and values add "
        f"{position:,} bytes per position in each layer.",
    )
    return d


# Threads, and the device, with their left edge, width and color.
LANES = {
    "caller's thread": (16, 184, BLUE),
    "text thread": (203, 169, GREEN),
    "engine's thread": (382, 156, VERMILION),
    "device": (544, 132, PURPLE),
}
# The numbered hops of simplellm/README.md: which lane, the name, what happens.
HOPS = (
    ("caller's thread", "LLM.generate", "checks; text to ids"),
    ("caller's thread", "future_of", "a future and its readers"),
    ("caller's thread", "OutputProcessor.submit", "numbers the request"),
    ("caller's thread", "Engine.submit", "Scheduler.add: in line"),
    ("engine's thread", "Engine.step", "Scheduler.schedule"),
    ("engine's thread", "Runner.launch", "the batch, one copy"),
    ("device", "Model.forward", "gives logits"),
    ("device", "Runner.sample", "draws a token"),
    ("engine's thread", "Engine.collect", "waits; commits"),
    ("engine's thread", "Engine.emit", "an Event, queued"),
    ("text thread", "Reader.push", "tokens to text"),
    ("text thread", "FutureResult.deliver", "sets the result"),
    ("caller's thread", "RequestFuture.result", "list of RequestOutput"),
)


def request() -> Drawing:
    """The hops of a request on lanes, one lane a thread, time downward."""
    pitch, tall, top = 48, 38, 68
    height = top + pitch * len(HOPS) + 22
    d = Drawing("A request's way through the engine", height)
    for name, (x, w, color) in LANES.items():
        d.panel(x, 20, w, height - 40, fill=tint(color, 0.95))
        d.text(x + w / 2, 42, name, bold=True, anchor="middle", color=shade(color))
    boxes = []
    for i, (lane, name, what) in enumerate(HOPS):
        x, w, color = LANES[lane]
        box = d.box(x + 6, top + pitch * i, w - 12, tall, color=color, fill=WHITE)
        d.text(x + 30, box.cy - 7.5, name, size=11, mono=True, bold=True, box=box)
        d.text(x + 30, box.cy + 8, what, size=11, color=MUTED, box=box)
        d.badge(x + 18, box.cy, str(i + 1), mix(color, INK, 0.25), 9)
        boxes.append(box)

    for i in (0, 1, 2, 4, 6, 8, 10):
        above, under = boxes[i], boxes[i + 1]
        d.arrow((above.cx, above.bottom), (under.cx, under.y))
    for i in (3, 5, 7, 9, 11):
        # To another lane: out at the side, and in from above or at the side.
        start, end = boxes[i], boxes[i + 1]
        if end.x > start.x:
            d.arrow((start.right, start.cy), (end.cx, start.cy), (end.cx, end.y))
        else:
            d.arrow((start.cx, start.bottom), (start.cx, end.cy), (end.right, end.cy))
    step, tell = boxes[4], boxes[9]
    left = 375
    d.arrow((tell.x, tell.cy), (left, tell.cy), (left, step.cy), (step.x, step.cy))
    d.note(
        left - 8, boxes[6].cy - 7, "once for each token,", "until it ends", anchor="end"
    )
    d.note(
        460, boxes[6].cy - 7, "meanwhile the next", "step is scheduled", anchor="middle"
    )

    def waits(x: float, first: float, last: float, string: str) -> None:
        middle = (first + last) / 2
        d.line((x, first), (x, middle - 12), dash=True)
        d.line((x, middle + 12), (x, last), dash=True)
        d.note(x, middle, string, anchor="middle")

    d.note(610, 66, "runs what the", "engine's thread", "has queued", anchor="middle")
    waits(boxes[3].cx, boxes[3].bottom + 4, boxes[12].y - 4, "free, or waiting")
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"model": model(), "request": request()}
