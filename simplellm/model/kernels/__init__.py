"""Triton kernels for what the engine does in every step.

A module holds kernels and their launchers, which check nothing. What an operation
computes is said by the function of the same name in `simplellm.model.ops`;
`triton_ops` puts them together in a table of operations.

- `triton_ops.py` the table, `launch.py` starting kernels, `compiling.py` compiling them
  side by side at load, `argmax_keys.py` numbers with their indices as one int64.
- `norm.py`, `rope.py`, `linear.py`, `head.py`: the small parts of a layer and the head;
  `other_families.py` and `gated.py` what other families need besides.
- `attention.py` chooses between `prefill.py`, `decode.py`, `decode_fp8.py` and, where
  drafts are checked, `verify.py`, all made of the parts in `key_tiles.py` and
  `softmax.py`; `flash.py` is flash-attn.
- `expert_blocks.py`, `sorting.py`, `routing.py`, `experts.py`, `experts_one.py` and
  `fragments.py`: experts in MXFP4; `grouped.py` and `grouped_few.py` those of other
  formats.
- `scaled_linear.py`, `scales.py` and `rounding.py`: weights of 8 bits, and inputs.
- `draw.py`, `filters.py`, `penalties.py`: choosing tokens.
- `reduce.py` adds up what several ranks have computed, `vocabulary.py` is for the part
  of it that a rank has; `exchange.py` how their GPUs write to each other, and
  `expert_exchange.py` how their tokens get to the experts and back.
- `bandwidth.py` measures how fast memory is read.
"""
