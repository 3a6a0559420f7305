"""Engines in processes of their own, apart from the server's.

`core.py` is the engine's process, `client.py` its stand-in in the server's, `wire.py`
what crosses between them. `replicas.py` makes several of them one, and `prefixes.py`
says which of them gets a prompt.
"""
