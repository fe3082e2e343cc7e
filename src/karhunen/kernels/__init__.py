"""Kernels: one folder per operation, `naive.py` its definition, `cpu.py` the same signature, faster.

A leaf of the package: it imports nothing of karhunen but itself, and numba only when a kernel is asked for.
"""
