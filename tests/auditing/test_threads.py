"""An audit with as many threads as a user's process has: the suite's own run with one each."""

from __future__ import annotations

import os
import subprocess
import sys

AUDIT = """
import numpy as np, torch, mispair
torch.set_num_threads(4)
rng = np.random.default_rng(0)
hidden = rng.standard_normal((400, 40))
left, right = (np.float32(hidden @ np.eye(40, 100) + 0.02 * rng.standard_normal((400, 100))) for _ in range(2))
right[:80] = np.roll(right[:80], 1, axis=0)
found = mispair.audit(left, right, joint=True, device="cpu", workers=4)
assert found.judge.joint and np.isfinite(found.match_score).all()
print(found.is_mismatch[:80].mean(), found.is_mismatch[80:].mean())
"""


def test_vectors_of_a_common_space_with_several_threads() -> None:
    free = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    run = subprocess.run([sys.executable, "-c", AUDIT], env=free, capture_output=True, text=True, check=True)
    wrong, right = map(float, run.stdout.split())
    assert wrong > 0.9
    assert right < 0.05
