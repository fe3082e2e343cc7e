"""Kernels: one folder per operation, `naive.py` its definition, `cpu.py` and `gpu.py` the same, faster.

A leaf of the package: it imports nothing of karhunen but itself, and numba or triton only when a kernel is asked for.
"""
