"""Prompt files in the layouts of GenEval and of DiffusionNFT's OCR and DrawBench sets."""

import pytest

from integrations.diffusion_nft.prompts import Prompt, load_prompts

# A few lines of the evaluation prompts that the Apache-2.0 DiffusionNFT repository ships.
GENEVAL = """\
{"tag": "counting", "include": [{"class": "wine glass", "count": 2}], \
"exclude": [{"class": "wine glass", "count": 3}], "prompt": "a photo of two wine glasses"}

{"tag": "color_attr", "include": [{"class": "handbag", "count": 1, "color": "pink"}, \
{"class": "scissors", "count": 1, "color": "black"}], "prompt": "a photo of a pink handbag and a black scissors"}
"""
OCR = """\
A high-fashion runway with a sleek, modern backdrop displaying "Spring Collection 2024". Models walk confidently.
A close-up of a sleek smartwatch on a wrist, the screen displaying "Step Goal Achieved" with an animation.
New York Skyline with 'Google Research Pizza Cafe' written with fireworks on the sky.
"""


def test_geneval_lines_become_metadata(tmp_path):
    path = tmp_path / "geneval.jsonl"
    path.write_text(GENEVAL)
    glasses, attributes = load_prompts(path)
    assert glasses.text == "a photo of two wine glasses"
    assert glasses.metadata["include"] == [{"class": "wine glass", "count": 2}]
    assert glasses.metadata["exclude"] == [{"class": "wine glass", "count": 3}]
    assert "prompt" not in glasses.metadata
    assert [entry["color"] for entry in attributes.metadata["include"]] == ["pink", "black"]


def test_text_lines_and_the_quoted_text(tmp_path):
    path = tmp_path / "ocr.txt"
    path.write_text(OCR)
    prompts = load_prompts(path)
    assert [prompt.quoted for prompt in prompts] == ["Spring Collection 2024", "Step Goal Achieved", None]
    assert all(prompt.metadata == {} for prompt in prompts)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [('"A" and "B"', "A"), ('an open "quote', None), ('""', ""), ("no quotes", None), ('say " x "', " x ")],
)
def test_first_pair_of_double_quotes_counts(text, quoted):
    assert Prompt(text).quoted == quoted


def test_repeated_prompts_are_kept_and_equal(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("a cat\na cat\n")
    first, second = load_prompts(path)
    assert first == second
    assert len({first, second}) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", "x", "suffix '.csv'"),
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{oops', "p.jsonl:2 is not JSON"),
        ("p.jsonl", '{"text": "a"}', 'p.jsonl:1 needs a JSON object with a string under "prompt"'),
        ("p.jsonl", '{"prompt": "a", "include": [{"count": 1}]}', 'needs a "class"'),
        ("p.jsonl", '{"prompt": "a", "include": [{"class": "dog", "count": 0}]}', 'a "count" of at least 1'),
        ("p.jsonl", '{"prompt": "a", "include": [{"class": "dog", "count": "two"}]}', 'a "count" of at least 1'),
    ],
)
def test_malformed_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match="p\\.") as error:
        load_prompts(path)
    assert message in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_prompts(tmp_path / "none.txt")
