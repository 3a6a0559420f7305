"""The engine of `simplellm serve`: a process of its own, on the same machine.

`engine_process.py` is that process, `client.py` its stand-in in the server's, `wire.py`
what crosses between them. `replicas.py` makes several of them one, and `prefixes.py`
says which of them gets a prompt.
"""
