"""What users call: text or messages in; futures, streams and turns of a chat out.

`llm.py` is the class `LLM`; `load.py` makes one from a checkpoint folder, and every
choice that depends on the machine: `choose_operations.py` which kernels compute.
`follower.py` is the worker process of another rank. `input_processor.py` makes requests
of what is asked for: `checks.py` has its checks, `chat_options.py` what a chat asks of
its turn, and `grammars.py` compiles what outputs must fit. `output_processor.py` is the
thread that brings events to whoever waits: futures in `futures.py`, iterators and
coroutines in `streams.py`. `reply.py` detokenizes, as vLLM's IncrementalDetokenizer: it
makes text and turns of tokens, up to a stop string (`stops.py`); `outputs.py` has the
records that calls return and `build_outputs.py` fills them.
"""
