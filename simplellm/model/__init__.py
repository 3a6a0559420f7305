"""The model: weights as records and one forward pass over a table of operations.

`model.py` is the forward pass, `eagle.py` a small head that guesses what it gives next,
`layers.py` what a layer is made of, `build.py` fills these records from a checkpoint.
`batch.py` is a step as one int32 array, `kv_pool.py` the memory of keys and values,
`fp8_cache.py` that with bytes for numbers, `kv_gather.py` where decodes find theirs
without a kernel, `chunks_as_decodes.py` how short chunks become decodes,
`one_sequence.py` one text by itself. The operations: `ops.py` in PyTorch, with
`attention.py`, `feed_forward.py` and `moe.py` of experts; `family_rules.py` chooses for
a layer between gpt-oss's functions and `other_families.py`; `ops_cpu.py` for a CPU and
`ops_numpy.py` for small models there; `kernels/` in Triton; `parallel.py` for one of
several ranks, which choose tokens by `sharded_choice.py` and, on GPUs, talk by
`nccl.py`. `rope.py` is how far positions turn, `rope_cache.py` tables of it,
`memory.py` how much memory things take, `machine.py` what this machine has.
"""
