"""Structured output: from a schema, a pattern or a grammar to one that runs.

`rules.py` turns what users ask for into rules that llguidance reads, `schemas.py` says
which JSON schemas can be held, `compiler.py` compiles rules over the tokens of a model,
which `vocabulary.py` shows to llguidance.
"""
