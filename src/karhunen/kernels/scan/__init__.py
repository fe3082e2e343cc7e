"""Scanning additive nibbles on a CPU: the vector code behind karhunen.kernels.scan_attention."""
