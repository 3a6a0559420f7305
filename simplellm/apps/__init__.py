"""What runs on top of the engine: the command line, batch files, measurements.

`cli.py` is the command `simplellm`; `options.py` has what its commands share and
`screen.py` shows answers on a terminal, for which `calculator.py` is a tool to call;
`install.py` brings models that come as packages. `serving.py` is the command `serve`,
`info.py` describes a checkpoint and `quantize.py` rewrites one. `batch_file.py` keeps
the results of a file of requests, which `offline.py` answers as a server would.
`bench.py` measures a model and `bench_formats.py` its number formats, beside the limit
of `roofline.py`, on the machine that `peaks.py` measures, and `bench_speculation.py`
what drafts bring; `report.py` prints all. `workloads.py` draws requests that
`traffic.py` sends to a server.
"""
