"""What steps cost: measured once, when an engine that checks drafts is loaded."""

import time
from functools import partial

import torch

from simplellm.engine.graphs import CaptureShape
from simplellm.engine.runner import Runner
from simplellm.model.batch import Batch

MOST_TOKENS = 1024  # of a step that is measured
REPEATS = 5  # of which the fastest counts
STRIDE = 7919  # between tokens; a prime, so that they differ in any vocabulary


@torch.inference_mode()
def time_steps(runner: Runner) -> dict[int, float]:
    """Seconds that steps of 1, 2, 4, ... sequences take, each of one token.

    They write to the cache's first place, so that nothing may be there yet.
    """
    seconds, size, device = {}, 1, runner.device
    pages = runner.table_width if device.type == "cuda" else 1
    while size <= min(len(runner.sampled_tokens), MOST_TOKENS):
        numbers = Batch.size(size, size, pages, len(runner.pool.windows))
        flat = torch.zeros(numbers, dtype=torch.int32, device=device)
        batch = runner.view(flat, size, size, pages, size)
        # Different tokens, as in a real step: equal ones would share their experts.
        batch.tokens[:] = torch.arange(size) * STRIDE % runner.model.config.vocab_size
        batch.lengths[:] = 1
        batch.query_start_loc[:] = torch.arange(size + 1)
        batch.logits_indices[:] = torch.arange(size)
        run = partial(runner.replayed, batch, CaptureShape(size, size))
        times = []
        for _ in range(1 + REPEATS):  # the first one may compile
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        seconds[size] = min(times[1:])
        size *= 2
    return seconds
