"""The model: weights as records and one forward pass over a table of operations.

`model.py` is the forward pass, `layers.py` what a layer is made of, `build.py` fills
these records from a checkpoint. `batch.py` is a step as one int32 array, `kv_pool.py`
the memory of keys and values, `gather.py` where decodes find theirs without a kernel,
`sequence.py` one text by itself. The operations: `ops.py` in PyTorch, with
`attention.py`, `feed_forward.py` and, for other families, `variants.py`; `ops_numpy.py`
for small models on a CPU; `kernels/` in Triton. `rope.py` is how far positions turn,
`rotations.py` tables of it, `sizes.py` how much memory things take,
`machine.py` what this machine has.
"""
