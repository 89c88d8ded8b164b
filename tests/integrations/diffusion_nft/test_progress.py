import io

from rich.console import Console

from integrations.diffusion_nft.progress import RunProgress


def run(console, steps=3):
    with RunProgress(steps, console=console) as progress:
        progress.note("a note")
        for step in range(1, steps + 1):
            progress.update({"step": step, "rewards": {"ocr": 0.25, "count": float("nan")}})
    return console.file.getvalue()


def test_without_a_terminal_there_are_plain_lines_for_the_first_and_last_step():
    text = run(Console(file=io.StringIO(), force_terminal=False, width=200))
    lines = text.splitlines()
    assert lines[0] == "a note"
    assert lines[1].startswith("step 1/3")
    assert "ocr 0.250  count –" in lines[1]
    assert lines[-1].startswith("step 3/3")
    assert "\x1b" not in text
    assert len(lines) == 3


def test_on_a_terminal_there_is_a_bar_with_rewards():
    text = run(Console(file=io.StringIO(), force_terminal=True, width=200))
    assert "ocr 0.250" in text
    assert "3/3" in text
    assert "a note" in text
