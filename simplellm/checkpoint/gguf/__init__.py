"""GGUF files: a whole model in one file, as llama.cpp writes it.

`container.py` reads the header, `metadata.py` makes of it what config.json says on the
hub, `tokens.py` the files of the tokenizer. `names.py` says what our tensors are called
there, `tensors.py` makes our numbers of theirs, of some types with `blocks.py`,
`packed.py` what a CPU multiplies as it is, and `source.py` puts all that together.
"""
