"""Tests of the command that writes the README's numbers."""

import json

import pytest

from igcore.errors import ParameterError
from igcore.paper import swept
from igcore.runs import readme

README = "before\n<!-- main-table:start -->\nof the last run\n<!-- main-table:end -->\nafter\n"


def test_update_block_touches_nothing_else(tmp_path):
    """Guards against lost prose, and a block that grows each time it is filled."""
    path = tmp_path / "README.md"
    path.write_text(README, encoding="utf-8")
    for text in ("| \\1 new |\n", "| \\1 new |"):
        readme.update_block(path, "main-table", text)
        assert path.read_text(encoding="utf-8") == (
            "before\n<!-- main-table:start -->\n\n| \\1 new |\n\n<!-- main-table:end -->\nafter\n"
        )


@pytest.mark.parametrize(
    "text",
    [
        "",
        README + README,
        README.replace("start", "begin"),
        "<!-- main-table:end --> <!-- main-table:start -->",
    ],
)
def test_update_block_without_its_markers(tmp_path, text):
    """Guards against numbers written nowhere, or twice, without a word."""
    path = tmp_path / "README.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        ParameterError, match="<!-- main-table:start --> and <!-- main-table:end --> once each"
    ):
        readme.update_block(path, "main-table", "numbers")
    assert path.read_text(encoding="utf-8") == text


def test_the_main_table_says_what_fewer_prompts_mean(tmp_path):
    """Guards against a missing mean that nobody explains, and an explanation where there is nothing
    to explain.
    """
    (tmp_path / "main.md").write_text("| a table |\n")
    (tmp_path / "main.csv").write_text(
        "policy,method,n_prompts\nraw,base,48\nraw,args,48\nchat,base,12\n"
    )
    assert readme.main_table(tmp_path) == "| a table |\n"
    (tmp_path / "main.csv").write_text(
        "policy,method,n_prompts\nraw,base,48\nraw,args,12\nchat,base,12\n"
    )
    assert readme.main_table(tmp_path) == f"| a table |\n\n{readme.SUBSET}"


def executed(path, seconds):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metadata": {"papermill": {"duration": seconds}}}))


BLOCKS = (
    "main-table",
    "notebooks",
    "critic-search",
    "bench",
    "figures",
    "ablation-figures",
    "paper-plan",
)


def test_the_command_fills_every_block(tmp_path):
    """Guards against a README whose numbers no command writes, and a traceback where a file is
    missing.
    """
    path, runs = tmp_path / "README.md", tmp_path / "runs"
    path.write_text(
        "".join(README.replace("main-table", name) for name in BLOCKS), encoding="utf-8"
    )
    arguments = ["--readme", str(path), "--tables", str(tmp_path), "--runs", str(runs)]
    with pytest.raises(SystemExit, match=r"^error: .*main\.md is not there"):
        readme.main(arguments)
    (tmp_path / "main.md").write_text("| a table |")
    with pytest.raises(SystemExit, match=r"^error: .*main\.csv is not there"):
        readme.main(arguments)
    (tmp_path / "main.csv").write_text(
        "policy,method,n_prompts\nraw,base,48\nraw,args,48\nchat,base,12\n"
    )
    with pytest.raises(
        SystemExit, match=r"^error: .*start\.ipynb is not there; run `make reproduce` first"
    ):
        readme.main(arguments)
    for name, seconds in {
        "start": 60,
        "theory": 12,
        "critics/a/executed": 30,
        "decode-a/executed": 90,
        "decode-b/executed": 108,
        "examples-a/executed": 12,
        "tables": 3,
        "figures": 6,
        "judge/a/executed": 5,
        "audit": 4,
    }.items():
        executed(runs / f"{name}.ipynb", seconds)
    for name, make in (("ablation_critic_search", "critic-search"), ("bench_ratios", "bench")):
        with pytest.raises(
            SystemExit, match=rf"^error: .*{name}\.md is not there; .* `make {make}`"
        ):
            readme.main(arguments)
        (tmp_path / f"{name}.md").write_text(f"| {name} |")
    readme.main(arguments)
    text = path.read_text(encoding="utf-8")
    assert "45_ablations.ipynb) |" in text and "| not run |" in text
    executed(tmp_path / "ablations" / "decode-c" / "executed.ipynb", 126)
    readme.main(arguments)
    text = path.read_text(encoding="utf-8")
    assert (
        "| a table |" in text
        and "| bench_ratios |" in text
        and "| ablation_critic_search |" in text
    )
    assert (
        "| 3.5 | no |" in text
        and "| 2.1 | no |" in text
        and "| 0.1 | no |" in text
        and "of the last run" not in text
    )
    assert readme.figure_list() in text and readme.ablation_list() in text


def test_every_list_is_a_table():
    """Bug: a picture whose text begins a new cell or line, so that the table breaks."""
    for text in [*readme.FIGURES.values(), *readme.TABLES.values(), *readme.ABLATIONS.values()]:
        assert "|" not in text and "\n" not in text
    assert readme.ablation_list().splitlines()[:2] == ["| picture | what it shows |", "|:--|:--|"]
    waiting = {
        name
        for name, text in (readme.FIGURES | readme.TABLES).items()
        if "`make ablations`" in text
    }
    assert waiting == {*(f"paper_{name}" for name in swept.TABLES), swept.PICTURE}
