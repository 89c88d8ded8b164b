"""What is installed: gradbalance alone, typed, needing torch and numpy only."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import gradbalance

ROOT = Path(__file__).parents[2]


def test_the_wheel_ships_gradbalance_alone(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"gradbalance", f"gradbalance-{gradbalance.__version__}.dist-info"}
    assert "gradbalance/py.typed" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "gradbalance").rglob("*.py")}
    assert modules <= set(names)
    metadata = zipfile.ZipFile(wheel).read(f"gradbalance-{gradbalance.__version__}.dist-info/METADATA").decode()
    required = {line.split(":")[1].strip() for line in metadata.splitlines() if line.startswith("Requires-Dist")}
    assert {line for line in required if "extra ==" not in line} == {"torch>=2.6", "numpy>=1.26"}
    extras = {line.split(":")[1].strip() for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert extras >= {"solvers", "diffusion", "bench", "docs", "dev"}


def test_importing_it_loads_no_optional_package():
    code = "import sys, gradbalance.solvers, gradbalance.balancers; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    optional = {"cvxpy", "cvxpylayers", "scipy", "diffusers", "transformers", "matplotlib", "rich", "pydantic", "yaml"}
    assert not optional & set(loaded.split())


def test_every_pin_is_exact_and_meets_the_declared_range():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert all(version[0].isdigit() for version in pins.values())
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"].values()
    wanted = [*declared["dependencies"], *(requirement for extra in extras for requirement in extra)]
    pinned = {name.lower().replace("_", "-") for name in pins}
    for requirement in wanted:
        name = requirement.split("[")[0].split(">")[0].split(",")[0].strip().lower().replace("_", "-")
        assert name == "gradbalance" or name in pinned, requirement
