"""Penalties on tokens that were there before, counted on the device.

B rows (one sequence each), P of them with penalties, V vocabulary.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from simplellm.base.host_memory import upload
from simplellm.base.sample_position import DraftPosition, SamplePosition


class TokenCounts:
    """How often each token was in the prompts and outputs of rows with penalties.

    Kept on the device from step to step, so that the host need not know a token before
    the next step begins.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.invalidate()

    def invalidate(self) -> None:
        """Count from the tokens of the requests again the next time."""
        self.row_of: dict[int, int] = {}  # the rows of a step, by requests' numbers
        self.counts: dict[int, tuple[Tensor, Tensor]] = {}  # their counts, by the same

    def prepare(self, requests: Sequence[SamplePosition]) -> bool:
        """Bring the counts into the order of a step's rows; False if none needs any.

        A request that was not in the step before is counted anew; all of its tokens are
        known.
        """
        penalized = {row: r for row, r in enumerate(requests) if r.params.penalizes}
        row_of = {request.request_id: row for row, request in penalized.items()}
        # What a step adds to these depends on how many drafts are right.
        some = penalized.values()
        drafting = {r.request_id for r in some if isinstance(r, DraftPosition)}
        if not drafting and [*row_of.items()] == [*self.row_of.items()]:
            return bool(row_of)
        counts = [
            (not isinstance(r, DraftPosition) and self.counts.get(r.request_id))
            or self.count(r)
            for r in some
        ]
        self.invalidate()
        if not counts:
            return False
        self.row_of = {} if drafting else row_of
        self.in_prompt, self.in_output = map(torch.stack, zip(*counts, strict=True))
        rows = zip(self.in_prompt, self.in_output, strict=True)
        self.counts = {
            request.request_id: row
            for request, row in zip(some, rows, strict=True)
            if request.request_id not in drafting
        }
        self.rows = upload([*penalized], torch.int64, self.device)  # [P] of B
        params = [request.params for request in some]
        self.repetition, self.presence, self.frequency = (
            upload(column, torch.float32, self.device)[:, None]
            for column in (
                [p.repetition_penalty for p in params],
                [p.presence_penalty for p in params],
                [p.frequency_penalty for p in params],
            )
        )
        return True

    def count(self, request: SamplePosition) -> tuple[Tensor, Tensor]:
        """Which tokens the prompt has, bool [V], and the output how often, int32."""
        ids = upload(request.tokens, torch.int64, self.device)
        prompt, output = ids.tensor_split([request.num_prompt])
        in_prompt = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        in_output = torch.zeros_like(in_prompt, dtype=torch.int32)
        in_prompt[prompt] = True
        in_output.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return in_prompt, in_output

    def of_tokens(self, tokens: range) -> "TokenCounts":
        """The counts of some tokens, for logits of these alone."""
        part = copy(self)
        columns = slice(tokens.start, tokens.stop)
        part.in_prompt = self.in_prompt[:, columns]
        part.in_output = self.in_output[:, columns]
        return part

    def penalize(self, logits: Tensor) -> Tensor:
        """Penalized logits [B, V].

        The repetition penalty divides a positive logit and multiplies a negative one,
        so that it always makes a token less likely.
        """
        x = logits[self.rows]  # [P, V]
        scaled = torch.where(x > 0, x / self.repetition, x * self.repetition)
        in_output = self.in_output > 0
        x = torch.where(self.in_prompt | in_output, scaled, x)
        x = x - self.frequency * self.in_output - self.presence * in_output
        return logits.index_copy(0, self.rows, x)

    def add(self, tokens: Tensor) -> None:
        """Count the tokens, int32 [B], that were chosen for the rows of the step."""
        chosen = tokens[self.rows].long()[:, None]
        ones = torch.ones_like(chosen, dtype=torch.int32)
        self.in_output.scatter_add_(1, chosen, ones)
