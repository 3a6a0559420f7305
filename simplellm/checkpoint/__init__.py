"""Checkpoints: what lies in a folder, and how weights are stored.

`source.py` says what a model is loaded from, `checkpoint.py` opens a folder of
safetensors files as such a source, whose tensors `tensors.py` finds and puts together,
`gguf/` opens a file of llama.cpp's. `names.py` says what each tensor is called,
`folder.py` where a checkpoint lies and what the small files in it say, `packages.py`
which models come as a package. `families/` has a file of data for each family of
models. `formats.py` reads how weights are stored: `mxfp4.py` in 4 bits, `scaled.py` in
8, `stored.py` makes either from what a checkpoint holds; of AWQ's and GPTQ's 4 bits,
`awq_gptq.py` makes ordinary numbers. `int4.py` and `float16.py` have numbers as a CPU
multiplies them, `cpu_weights.py` also of experts; `in_float16.py` has a checkpoint so,
`read_ahead.py` by several threads, `sharding.py` what one of several ranks has of it
all, cut as `slices.py` says. `eagle.py` reads the folder of an EAGLE-3 head.
"""
