"""What is passed wrong in Python is answered by one line of ours: what was given, what was wanted, what would do."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wrong_calls_are_answered_in_one_line(tmp_path: Path) -> None:
    """In a process without the tests' type checks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.wrong_calls", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 50
    for name, (kinds, said, words, is_ours) in found.items():
        assert {"ValueError", "TypeError", "ModelUnavailable"} & set(kinds), (name, kinds, said)
        assert words in said, (name, said)
        assert "\n" not in said, name
        assert is_ours, name
