"""Triton kernels for what the engine does in every step.

A module holds kernels and their launchers, which check nothing. What an operation
computes is said by the function of the same name in `simplellm.ops`; `fused` puts them
together in a table of operations.
"""
