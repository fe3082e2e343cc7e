"""The report card of a codec: what was measured of it on which model and text, and whether that is good enough.

Made by `karhunen verify`, kept inside the artifact, shown when it is loaded and inspected. A gate that the uncompressed
model itself does not pass says nothing about the codec: it is inconclusive, neither passed nor failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Gate:
    """One number against its limit; `at_least` says on which side of it is good. `dense` is the uncompressed model's,
    where it has one; `reason` says why a gate is inconclusive, `note` what stands behind the number."""

    name: str
    value: float
    limit: float
    at_least: bool
    unit: str = ""
    dense: float | None = None
    reason: str = ""
    note: str = ""

    @property
    def said(self) -> str:
        """Verdict, and what is to be said of it."""
        return ": ".join(filter(None, (self.status, self.reason or self.note)))

    @property
    def status(self) -> str:
        """passed, failed, or inconclusive."""
        if self.reason:
            return "inconclusive"
        good = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "passed" if good else "failed"

    @property
    def line(self) -> str:
        """For people."""
        if self.reason:
            return f"{self.name}: inconclusive, {self.reason}"
        unit, sign = f" {self.unit}" if self.unit else "", "≥" if self.at_least else "≤"
        dense = "" if self.dense is None else f"; uncompressed {self.dense:.4g}"
        return f"{self.name}: {self.value:.4g}{unit} ({sign} {self.limit:.4g}{dense}) {self.status}"


@final
@dataclass(frozen=True)
class ReportCard:
    """Of the codec with this fingerprint. `texts` are hashes of what was read, `ratio` is 16 bits over those of a coded
    scalar, `made` says with which versions, when and where; `quick`: by fewer texts and requests than a full run."""

    codec: str
    model: str
    dtype: str
    texts: tuple[str, ...]
    n_scored: int
    bits_per_element: float
    ratio: float
    gates: tuple[Gate, ...]
    made: Mapping[str, str]
    quick: bool = False

    @property
    def passed(self) -> bool:
        """No gate failed, and at least one said something."""
        statuses = {gate.status for gate in self.gates}
        return "failed" not in statuses and "passed" in statuses

    @property
    def line(self) -> str:
        """In one line: what failed, or how much passed."""
        failed = [f"failed {gate.line.removesuffix(' failed')}" for gate in self.gates if gate.status == "failed"]
        n_passed, n_open = (sum(g.status == status for g in self.gates) for status in ("passed", "inconclusive"))
        rest = f", {n_open} inconclusive" if n_open else ""
        said = "; ".join(failed) or f"{n_passed} of {len(self.gates)} gates passed{rest}"
        verdict = "NOT good enough" if not self.passed else "quickly verified" if self.quick else "verified"
        return f"{verdict} on {self.model} ({self.dtype}), {self.ratio:.1f} times smaller: {said}"
