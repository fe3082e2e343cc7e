"""Mutated files of one kind for so many minutes: whatever is neither refused in one line nor used is printed and kept.

    python -m benchmarks.fuzz artifact --minutes 30            # or page, statistics, results
    NUMBA_BOUNDSCHECK=1 python -m benchmarks.fuzz artifact --minutes 5

Minutes are of the processor, not of the clock. Cases that fail are added to `tests/fuzzing_found.json`, which
`tests/test_fuzzing.py` tries again for ever. Exit code 1 if any failed.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from itertools import count, cycle
from pathlib import Path

import torch
from tests.fuzzing import FOUND, SUBJECTS, TARGETS, Found, run_case


def main() -> int:
    """Run until the time is up."""
    reading = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reading.add_argument("target", choices=sorted(TARGETS))
    reading.add_argument("--minutes", type=float, default=1.0, help="of the processor")
    reading.add_argument("--start", type=int, default=0, help="the first seed: another one finds other cases")
    given = reading.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # overflow in tables that say 1e38
    seen: Counter[str] = Counter()
    failed: list[tuple[str, str, int]] = []
    kinds: set[str] = set()
    with tempfile.TemporaryDirectory() as root:
        end = time.process_time() + 60 * given.minutes
        for seed, subject in zip(count(given.start), cycle(SUBJECTS[given.target])):
            if time.process_time() > end:
                break
            try:
                seen[run_case(given.target, subject, seed, Path(root) / "case")] += 1
            except Found as found:
                seen["failed"] += 1
                kind = f"{subject}: {str(found)[:60]}"
                if kind not in kinds:
                    kinds.add(kind)
                    failed.append((given.target, subject, seed))
                    print(f"{given.target} {subject} {seed}: {found}"[:400], flush=True)
    total = sum(seen.values())
    print(
        f"{given.target}: {total} cases in {given.minutes:g} minutes of the processor from seed {given.start}: "
        + ", ".join(f"{n} {what}" for what, n in seen.most_common())
    )
    if failed:
        known = [tuple(case) for case in json.loads(FOUND.read_text())]
        lines = ",\n".join(json.dumps(case) for case in sorted({*known, *failed}))
        FOUND.write_text(f"[\n{lines}\n]\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
