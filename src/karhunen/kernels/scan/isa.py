"""Which vector instructions a look-up and a product of words become, and how wide a vector is on this machine.

| instruction set | bytes | look-up of 16 | of 64, of 256 | products |
|---|---|---|---|---|
| AVX-512 (BW) | 64 | vpshufb | vpermb, vpermi2b with VBMI, else as AVX2 | vpmaddwd, or vpdpwssd with VNNI |
| AVX2 | 32 | vpshufb | 4 or 16 of vpshufb | vpmaddwd |
| NEON | 16 | tbl | tbl of 4, tbx of 4 | smlal |
"""

from functools import cache

import llvmlite.binding
from numba.core import config


@cache
def widths() -> tuple[int, ...]:
    """Widths in bytes that run here, the widest first; none where nothing is written for the processor."""
    triple = llvmlite.binding.get_process_triple()
    if triple.startswith(("aarch64", "arm64")):
        return (16,)
    if not triple.startswith("x86_64") or not {"avx2", "fma", "f16c"} <= _features():
        return ()
    return (64, 32) if {"avx512f", "avx512bw", "avx512vl"} <= _features() else (32,)


def description() -> str:
    """The instruction set in use."""
    if not widths():
        return "none"
    name = {64: "AVX-512", 32: "AVX2", 16: "NEON"}[widths()[0]]
    return f"{name} with VNNI" if fused_words(widths()[0] // 2) else name


def wide_lookups(width: int) -> int:
    """How many entries one instruction looks up where that is more than sixteen, 0 where it is not."""
    if llvmlite.binding.get_process_triple().startswith(("aarch64", "arm64")):
        return 64
    return 64 if width == 64 and "avx512vbmi" in _features() else 0


def lookup(width: int) -> str:
    """The intrinsic of a table of sixteen bytes."""
    if llvmlite.binding.get_process_triple().startswith(("aarch64", "arm64")):
        return "llvm.aarch64.neon.tbl1.v16i8"
    return {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}[width]


def paired_words(lanes: int) -> str | None:
    """The intrinsic that multiplies int16 and adds neighbours; None where LLVM writes it out."""
    if not llvmlite.binding.get_process_triple().startswith("x86_64"):
        return None
    return {8: "llvm.x86.sse2.pmadd.wd", 16: "llvm.x86.avx2.pmadd.wd", 32: "llvm.x86.avx512.pmaddw.d.512"}[lanes]


def fused_words(lanes: int) -> str | None:
    """The same that adds to a total at once; None where the processor has none of this width."""
    return "llvm.x86.avx512.vpdpwssd.512" if lanes == 32 and "avx512vnni" in _features() else None


@cache
def _features() -> frozenset[str]:
    """Of the processor that Numba compiles for: another may have been asked for by NUMBA_CPU_NAME."""
    if config.CPU_NAME and llvmlite.binding.get_host_cpu_name() != config.CPU_NAME:
        wide = config.CPU_NAME.startswith(("skylake-avx512", "icelake", "sapphire", "znver4", "znver5"))
        known = ["avx2", "fma", "f16c"] + (["avx512f", "avx512bw", "avx512vl"] if wide else [])
        return frozenset(known)
    asked = {name.lstrip("+") for name in (config.CPU_FEATURES or "").split(",") if name.startswith("+")}
    return frozenset(asked or {name for name, there in llvmlite.binding.get_host_cpu_features().items() if there})
