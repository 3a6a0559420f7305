"""What a CPU multiplies as it is: a matrix in 4 bits or in float16, and experts."""

from collections.abc import Sequence
from dataclasses import dataclass

from simplellm.checkpoint.float16 import Float16
from simplellm.checkpoint.int4 import Int4

CPUMatrix = Int4 | Float16


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """A weight [E, out, in] of experts, of which a product takes one at a time."""

    each: Sequence[CPUMatrix]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.each), *self.each[0].shape

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(weight.nbytes for weight in self.each)

    def __getitem__(self, expert: int) -> CPUMatrix:
        return self.each[expert]


CPUWeight = CPUMatrix | PackedExperts
