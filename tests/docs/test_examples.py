"""The scripts of docs/examples: two processes print what one process prints, and the preference is learned."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LEARN_PREFERENCE = ROOT / "docs" / "examples" / "learn_preference.py"
LOOPS = ("accelerate_loop", "ddp", "fsdp2", "lightning_loop")
EXAMPLES = [ROOT / "docs" / "examples" / f"{name}.py" for name in LOOPS]
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


def test_a_preference_is_learned():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, LEARN_PREFERENCE], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"after .* 3\.\d\d : [12]\.\d\d : [01]\.\d\d", done.stdout)
    page = (ROOT / "docs" / "solvers.md").read_text(encoding="utf-8")
    assert done.stdout in page


def test_the_exact_solver_learns_along_the_same_gradient():
    example = runpy.run_path(str(LEARN_PREFERENCE))
    for preference in ([3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [5.0, 1.0, 1.0]):
        found = []
        for solver in ("exact", "cvxpylayers"):
            leaf = torch.tensor(preference, requires_grad=True)
            example["distance"](leaf, torch.Generator().manual_seed(0), solver).backward()
            found.append(leaf.grad)
        assert found[0].abs().max() > 1e-2
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
