"""The rows of a step, one for each token: short chunks become decodes."""

from typing import Any

import torch

from simplellm.model.kv_gather import READ


def chunks_as_decodes(group: Any) -> dict[str, Any]:
    """What changes of a `KVGroup` if each token is a decode.

    Nothing if these decodes would read more than READ positions, each its own, or if a
    text begins with several of them: they share what they read.
    """
    ends = group.query_start_loc[1:].long()
    counts = ends - group.query_start_loc[:-1]
    owners = torch.arange(len(ends), device=ends.device).repeat_interleave(counts)
    indices = torch.arange(len(owners) + 1, device=ends.device)
    lengths = group.lengths[owners] - (ends[owners] - 1 - indices[:-1])
    begins = (group.lengths == counts) & (counts > 1)
    if begins.any() or lengths.sum() > READ:
        return {}
    return {
        "tables": group.tables[owners],
        "offsets": group.offsets[owners],
        "lengths": lengths,
        "query_start_loc": indices,
        "decodes": len(owners),
        "queries": 1,
    }
