"""The training loops of docs/examples: two processes print the same, and what one process prints."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = [p for p in sorted((ROOT / "docs" / "examples").glob("*.py")) if not p.stem.startswith("grpo")]
RANK = re.compile(r"rank (\d) of (\d): coefficients \[([\d., ]+)\], parameters ([\d.]+)")
SHOWN = re.compile(r'^```python title="(.*?)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def run(script, ranks):
    """Coefficients and checksum, as each rank printed them."""
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", free_port(), script]
    command = [script, str(ranks)] if script.stem == "lightning_loop" else torchrun
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    printed = sorted(RANK.findall(done.stdout))
    assert [(rank, size) for rank, size, *_ in printed] == [(str(r), str(ranks)) for r in range(ranks)], done.stderr
    assert done.returncode == 0, done.stderr
    return [[*map(float, coefficients.split(",")), float(checksum)] for *_, coefficients, checksum in printed]


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.name)
def test_two_ranks_do_what_one_does(script):
    (alone,) = run(script, 1)
    first, second = run(script, 2)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-3)


def test_the_page_shows_the_scripts():
    shown = dict(SHOWN.findall((ROOT / "docs" / "training_loops.md").read_text(encoding="utf-8")))
    assert shown == {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in EXAMPLES}
