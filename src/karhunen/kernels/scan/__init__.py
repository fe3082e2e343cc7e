"""Scanning bytes by look-ups in registers of a CPU: the vector code behind karhunen.kernels.scan_attention."""
