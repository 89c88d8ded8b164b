import json
import math

import pytest

from integrations.diffusion_nft.caps import HYSTERESIS, MEMORY, Caps


def follow(caps, values, name="ocr"):
    seen = []
    for value in values:
        caps = caps.after({name: value})
        seen.append(name in caps.satisfied)
    return caps, seen


def test_beyond_the_cap_it_leaves_and_below_it_comes_back():
    _, seen = follow(Caps({"ocr": 0.9}), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2])
    assert seen == [False] * 8 + [True] + [False] * 2  # 0.5 of the mean's start fade as MEMORY^n
    assert 1 - 0.5 * MEMORY**7 < 0.9 < 1 - 0.5 * MEMORY**8


def test_just_below_the_cap_it_stays_away():
    caps, _ = follow(Caps({"ocr": 0.9}), [0.9])
    assert follow(caps, [0.9 * (1 - HYSTERESIS / 2)] * 50)[1] == [True] * 50
    assert follow(caps, [0.9 * (1 - 2 * HYSTERESIS)] * 50)[1][-1] is False
    assert follow(Caps({"ocr": 0.9}), [0.9 * (1 - HYSTERESIS / 2)] * 50)[1] == [False] * 50


def test_a_negative_cap_has_its_slack_below_it_too():
    caps, seen = follow(Caps({"ocr": -1.0}), [-0.9])
    assert seen == [True]
    assert follow(caps, [-1.015] * 60)[1][-1] is True
    assert follow(caps, [-1.1] * 60)[1][-1] is False


def test_rollouts_without_the_reward_change_nothing():
    caps, seen = follow(Caps({"ocr": 0.5}), [math.nan, 0.6, math.nan])
    assert seen == [False, True, True]
    assert caps.means == {"ocr": 0.6}


def test_rewards_without_a_cap_are_never_satisfied():
    assert Caps({}).after({"ocr": 9.0}).satisfied == frozenset()


def test_the_state_goes_through_json_exactly():
    caps, _ = follow(Caps({"ocr": 0.3}), [0.1, 0.7, 1 / 3, 0.9])
    again = Caps({"ocr": 0.3}).loaded(json.loads(json.dumps(caps.state_dict())))
    assert again == caps
    assert follow(again, [0.2] * 9)[1] == follow(caps, [0.2] * 9)[1]
    assert pytest.approx(0.1 * 0.8**3 + 0.2 * (0.7 * 0.64 + 0.8 / 3 + 0.9)) == caps.means["ocr"]
