"""Kernels: one folder per operation, `naive.py` its definition, `cpu.py` and `gpu.py` the same signature, faster.

A leaf of the package: it imports nothing of karhunen but itself, and numba and triton only when a kernel is asked for.
"""
