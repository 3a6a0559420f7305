"""Wrong answers to chapter 3."""

import torch

from simplellm.weights import BLOCK, MXFP4, VALUES
from wrong import wrong

SIXTEEN = torch.tensor(VALUES)


def scaled(weight: MXFP4, codes: torch.Tensor, bias: int = 127) -> torch.Tensor:
    """The elements ``codes`` [..., G, 32] times their scales."""
    exponents = weight.scales.int()[..., None] - bias
    return torch.ldexp(SIXTEEN[codes.int()], exponents).flatten(-2)


def nibbles(weight: MXFP4) -> torch.Tensor:
    """The codes [..., G, 32]."""
    return torch.stack([weight.blocks & 15, weight.blocks >> 4], -1).flatten(-2)


@wrong("MXFP4.dequantize", "low nibble")
class HighNibbleFirst(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        pairs = torch.stack([self.blocks >> 4, self.blocks & 15], -1)
        return scaled(self, pairs.flatten(-2)).to(dtype)


@wrong("MXFP4.dequantize", "neighbors")
class AllLowNibblesFirst(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        codes = torch.cat([self.blocks & 15, self.blocks >> 4], -1)
        return scaled(self, codes).to(dtype)


@wrong("MXFP4.dequantize", "scale byte")
class OtherBias(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        return scaled(self, nibbles(self), bias=128).to(dtype)


@wrong("MXFP4.dequantize", "blocks of a row")
class BlocksApart(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        return scaled(self, nibbles(self)).unflatten(-1, (-1, BLOCK)).to(dtype)


@wrong("MXFP4.dequantize", "a scale of its own")
class OneScaleARow(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        first = self.scales[..., :1].expand_as(self.scales)
        return scaled(MXFP4(self.blocks, first), nibbles(self)).to(dtype)
