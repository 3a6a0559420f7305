"""The engine: a thread that serves many requests at once, step by step.

`engine.py` is that thread. `request_queues.py` knows who waits and who runs,
`scheduler.py` says who computes how many tokens in the next step, `page_pool.py` knows
the pages of the KV cache, `page_manager.py` says which of them belongs to whom,
`offloading.py` brings evicted ones to the host's memory and back,
`runner.py` runs the step on the device (`build_runner.py` makes it), `step_output.py`
says what came of it, `input_batch.py` writes it into arrays,
`block_tables.py` keeps the rows of its block tables, `launch_timer.py` says when, and
`graphs.py` records it as a CUDA graph.

`speculative_scheduler.py` lets a step check drafts, guesses of the next tokens:
`suffix_drafter.py` makes them of what a text said before, `head_drafter.py` of what an
EAGLE-3 head reads, for requests that `host_proposer.py` names, and `model_drafter.py`
of what a smaller model says. `speculator.py` chooses how many, by what
`draft_budget.py` knows of their costs, which `step_times.py` measures, and of how many
were right; `drafts.py` has the rules. `verify_chunks.py` says what such a step computes
and `build_speculation.py` puts all of it together.

`sampler.py` chooses tokens. `stats.py` counts; `joins.py` makes the counts of several
engines one. `ranks.py` has several processes take part in each step, as
`start_ranks.py` starts them; where each has requests of its own, that is
`data_parallel_ranks.py`, with `data_parallel_scheduler.py` and
`data_parallel_runner.py`. `stall_detector.py` tells those that are busy from one that
hangs. `snapshot.py` types what an engine says of its requests and pages, `warmup.py`
compiles kernels before they are needed, and `engine_client.py` has what an engine in
another process shares with one in this.
"""
