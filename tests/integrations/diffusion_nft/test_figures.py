import numpy as np
import pytest
import torch

from integrations.diffusion_nft import figures
from integrations.diffusion_nft.prompts import Prompt
from integrations.diffusion_nft.rollout import Rollout

NAN = float("nan")
NAMES = ["ocr", "tint"]


def record(step, measured=True):
    return {
        "step": step,
        "rewards": {"ocr": None if step == 2 else 0.1 * step, "tint": 0.5},
        "coefficients": {"ocr": 1.0, "tint": 2.0},
        "refreshed": measured,
        "cosines": [[1.0, -0.5], [-0.5, None]] if measured else None,
        "update_cosines": {"ocr": 0.3, "tint": None} if measured else None,
    }


@pytest.fixture
def rollout():
    prompts = [Prompt(f"picture {i}") for i in range(10)]
    rewards = torch.stack([torch.full((10,), NAN), torch.arange(10) / 10]).double()
    rewards[0, 5] = 1.0
    return Rollout(prompts, torch.zeros(10, 1), np.zeros((10, 8, 8, 3), np.uint8), rewards, {})


def test_rewards_figure_has_one_panel_per_reward_with_held_out_points():
    evaluations = {0: {"ocr": [0.0, NAN], "tint": [0.4, 0.6]}, 3: {"ocr": [0.2, NAN], "tint": [0.5, 0.9]}}
    figure = figures.rewards_figure([record(1), record(2), record(3)], evaluations, np.arange(2))
    assert [ax.get_title() for ax in figure.axes] == NAMES
    held_out = figure.axes[1].containers[0].lines[0]
    assert held_out.get_xdata().tolist() == [0, 3]
    assert held_out.get_ydata().tolist() == pytest.approx([0.5, 0.7])


def test_balance_figure_shows_measured_steps_only():
    figure = figures.balance_figure([record(1), record(2, measured=False), record(3)], NAMES)
    left, middle, right = figure.axes[:3]
    assert left.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert right.lines[0].get_xdata().tolist() == [1, 3]
    assert [text.get_text() for text in middle.texts] == ["1.00", "-0.50", "-0.50", "0.00"]
    figure.canvas.draw()


def test_grid_shows_each_picture_with_its_own_prompt_and_rewards(rollout):
    figure = figures.grid_figure(rollout, NAMES, 4, "title")
    labels = [ax.get_xlabel() for ax in figure.axes if ax.axison]
    assert labels == ["picture 0\ntint 0.00", "picture 3\ntint 0.30", "picture 6\ntint 0.60", "picture 9\ntint 0.90"]
    assert figures.caption(rollout, NAMES, 5) == "picture 5\nocr 1.00, tint 0.50"


def test_a_prompt_with_dollars_is_no_formula(rollout):
    rollout.prompts[0] = Prompt("$\\frac$ sign")
    figure = figures.grid_figure(rollout, NAMES, 12, "title")
    figure.canvas.draw()  # raises where the label is parsed as a formula
    assert any("\\frac" in ax.get_xlabel() for ax in figure.axes)


def test_running_mean_skips_missing_values():
    values = np.array([NAN, 1.0, NAN, 3.0])
    result = figures._running_mean(values)
    assert np.isnan(result[0])
    assert result[1:].tolist() == [1.0, 1.0, 2.0]


def test_saved_png_is_whole(tmp_path, rollout):
    from PIL import Image

    from integrations.diffusion_nft.run_folder import RunFolder

    figures.save(RunFolder(tmp_path), "samples/x.png", figures.grid_figure(rollout, NAMES, 2, "title"))
    with Image.open(tmp_path / "samples" / "x.png") as picture:
        picture.load()
        assert picture.format == "PNG"
