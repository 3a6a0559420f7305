"""The least time that a step can take on a machine: its roofline.

Bytes and arithmetic of a step follow from the model's shapes; how fast the machine
reads and multiplies is measured by `peaks`.
"""

from dataclasses import dataclass

from simplellm.base.config import ModelConfig
from simplellm.model.memory import count_parameters, kv_bytes, weight_bytes


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """How many experts of a layer some of ``tokens`` choose, on average.

    A token misses an expert with probability 1 - k/E if all choices are equally
    likely, so that E * (1 - (1 - k/E) ** tokens) of them are chosen.
    """
    experts, top_k = config.num_local_experts, config.num_experts_per_tok
    return experts * (1 - (1 - top_k / max(1, experts)) ** tokens)


@dataclass(frozen=True)
class Reads:
    """Bytes that one step must read, however it is computed."""

    dense: float  # attention, routers, norms, the LM head, rows of the embedding
    experts: float
    kv: float

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.kv


def read_bytes(
    config: ModelConfig, tokens: int, context: int = 0, *, itemsize: int = 2
) -> Reads:
    """What a step of one new token for each of ``tokens`` sequences must read.

    All weights but the embedding once, of the experts those that are expected to be
    chosen, and the keys and values of ``context`` positions for each sequence:

        dense + layers * distinct_experts * (bytes of one expert) + tokens * kv_bytes

    Activations and what is written are left out; both are small.
    """
    parts = weight_bytes(config, itemsize)
    experts = parts.pop("experts", 0)
    parts.pop("embedding", None)
    rows = tokens * config.hidden_size * itemsize
    share = distinct_experts(config, tokens) / max(1, config.num_local_experts)
    return Reads(
        dense=sum(parts.values()) + rows,
        experts=experts * share,
        kv=tokens * kv_bytes(config, context, itemsize=itemsize) if context else 0,
    )


def step_flops(config: ModelConfig, tokens: int, sampled: int) -> float:
    """Multiplications and additions by weights of a step with ``tokens`` tokens.

    Two for each active parameter; the LM head sees the ``sampled`` tokens alone. What
    attention computes from keys and values is left out.
    """
    counts = count_parameters(config)
    head = config.vocab_size * config.hidden_size
    return 2.0 * ((counts.active - head) * tokens + head * sampled)


@dataclass(frozen=True)
class Machine:
    """What the device does at best, measured by `measure_machine`."""

    bytes_per_second: float  # read from memory
    flops_per_second: float  # of a matmul in the model's dtype

    def least_seconds(self, nbytes: float, flops: float) -> float:
        """No program that reads and computes so much can be faster: the roofline."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)
