import json
from collections import Counter

import pytest

from integrations.diffusion_nft.config import UserError
from integrations.diffusion_nft.prompt_sampler import PromptSampler, load_strata
from integrations.diffusion_nft.prompts import Prompt

STRATA = [[Prompt(f"a{i}") for i in range(5)], [Prompt(f"b{i}") for i in range(7)], [Prompt(f"c{i}") for i in range(2)]]


def test_every_step_draws_equal_shares():
    sampler = PromptSampler(STRATA, 6, seed=0)
    for step in range(20):
        assert Counter(prompt.text[0] for prompt in sampler.draw(step)) == {"a": 2, "b": 2, "c": 2}


def test_a_stratum_is_used_up_before_it_repeats():
    sampler = PromptSampler(STRATA, 3, seed=0)
    drawn = [prompt.text for step in range(10) for prompt in sampler.draw(step) if prompt.text[0] == "a"]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == [prompt.text for prompt in STRATA[0]]
    assert drawn[:5] != drawn[5:]


def test_fewer_prompts_than_strata_take_turns():
    sampler = PromptSampler(STRATA, 2, seed=0)
    counts = Counter(prompt.text[0] for step in range(9) for prompt in sampler.draw(step))
    assert counts == {"a": 6, "b": 6, "c": 6}


def test_shares_are_exact_and_evenly_spread():
    sampler = PromptSampler(STRATA[:2], 10, seed=0, shares=[9, 1])
    drawn = [[prompt.text[0] for prompt in sampler.draw(step)] for step in range(7)]
    assert all(Counter(step) == {"a": 9, "b": 1} for step in drawn)
    assert len({step.index("b") for step in drawn}) == 1
    rare = [prompt.text for step in range(7) for prompt in sampler.draw(step) if prompt.text[0] == "b"]
    assert sorted(rare) == [prompt.text for prompt in STRATA[1]]  # used up before it repeats


def test_equal_shares_are_the_default():
    plain, shared = PromptSampler(STRATA, 4, seed=3), PromptSampler(STRATA, 4, seed=3, shares=[1, 1, 1])
    assert [plain.draw(step) for step in range(9)] == [shared.draw(step) for step in range(9)]


def test_wrong_shares_name_the_strata():
    with pytest.raises(UserError, match=r"prompts.shares=\[1, 2\] has 2 values for 3 strata, which begin with 'a0'"):
        PromptSampler(STRATA, 4, seed=3, shares=[1, 2])


def test_the_draw_depends_on_seed_and_step_alone():
    first, second = PromptSampler(STRATA, 6, seed=4), PromptSampler(STRATA, 6, seed=4)
    later = [first.draw(step) for step in range(8)][7]
    assert second.draw(7) == later
    assert PromptSampler(STRATA, 6, seed=5).draw(7) != later


def test_files_and_tags_are_strata(tmp_path):
    plain, tagged = tmp_path / "p.txt", tmp_path / "t.jsonl"
    plain.write_text("one\ntwo\n", encoding="utf-8")
    lines = [{"prompt": "x", "tag": "count"}, {"prompt": "y", "tag": "colors"}, {"prompt": "z", "tag": "count"}]
    tagged.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    strata = load_strata([str(plain), str(tagged)])
    assert [[prompt.text for prompt in stratum] for stratum in strata] == [["one", "two"], ["x", "z"], ["y"]]


@pytest.mark.parametrize(("name", "text"), [("gone.txt", None), ("empty.txt", ""), ("bad.jsonl", "{not json")])
def test_wrong_files_are_user_errors_that_name_the_file(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=name) as caught:
        load_strata([str(tmp_path / name)])
    assert "\n" not in str(caught.value)
