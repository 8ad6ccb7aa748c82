"""Tests of the command that writes the tables of the pages."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from docs import pages
from igcore.errors import RunError
from igstudy.report.claims import load_claims

ROOT = Path(__file__).parents[1]
PAGE = "before\n<!-- table main -->\nof the last run\n<!-- end -->\nafter\n"


def with_table(folder, text):
    path = folder / "figures/tables/main.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_block_is_written_and_nothing_else(tmp_path):
    """Guards against lost prose, and a block that grows each time it is written."""
    page = PAGE
    for text in ("| \\1 old |", "| \\1 new |\n"):
        with_table(tmp_path, text)
        page = pages.filled(page, tmp_path)
    assert page == "before\n<!-- table main -->\n\n| \\1 new |\n\n<!-- end -->\nafter\n"
    assert pages.filled("no block\n<!-- output -->\n<!-- end -->\n", tmp_path).count("\n") == 3


def test_two_blocks_keep_the_text_between_them(tmp_path):
    """Bug: everything from the first block to the end of the last one was replaced."""
    with_table(tmp_path, "| new |")
    page = pages.filled(PAGE + PAGE, tmp_path)
    assert page.count("| new |") == page.count("before") == page.count("after") == 2


def test_statements_stand_in_the_page_while_the_files_keep_to_them(tmp_path):
    """Guards a page of promises that params/paper has broken."""
    shutil.copytree(ROOT / "params/paper", tmp_path / "params/paper")
    block = "<!-- fidelity paper -->\n<!-- end -->\n"
    written = pages.filled(block, tmp_path)
    assert written.count("| faithful") > 10 and pages.filled(written, tmp_path) == written
    path = tmp_path / "params/paper/decode-main-vicuna-hex.yaml"
    path.write_text(path.read_text().replace("vicuna-hh/value", "vicuna-pku/value"))
    with pytest.raises(RunError, match="value is runs/paper/critics/vicuna-pku/value, not runs/"):
        pages.filled(block, tmp_path)


def test_verdicts_are_those_of_the_claims_that_stand_there(tmp_path):
    """Guards a page that shows verdicts on other claims than those of the file."""
    path = tmp_path / "params/ci/claims.yaml"
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "params/ci/claims.yaml", path)
    block = "<!-- claims ci -->\n<!-- end -->\n"
    with pytest.raises(RunError, match="claims.csv is not there; run `make reproduce`"):
        pages.filled(block, tmp_path)
    row = dict(outcome="reward", arm="ours", reference="theirs", difference=0.05, low=0.01)
    row |= dict(high=0.09, n_prompts=12, p_holm=0.01, claims_sha256=load_claims(path).digest)
    row |= dict(sentence="It is safest.", falsified="It is not.")
    rows = [row | {"claim": "one", "verdict": "held"}, row | {"claim": "two", "verdict": "failed"}]
    (tmp_path / "figures/tables").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(tmp_path / "figures/tables/claims.csv")
    written = pages.filled(block, tmp_path)
    cells = [line.split("|")[1:-1] for line in written.splitlines() if line.startswith("| It")]
    assert [[cell.strip() for cell in row] for row in cells] == [
        ["It is safest.", "held", "reward: +.050", "12"],
        ["It is safest.", "failed: It is not.", "reward: +.050", "12"],
    ]
    assert "1 of 2 claims held." in written
    path.write_text(path.read_text() + "# edited")
    with pytest.raises(RunError, match="claims.csv does not decide .*claims.yaml; run `make rep"):
        pages.filled(written, tmp_path)


def test_a_missing_table_is_one_sentence(tmp_path):
    """Guards against a page whose numbers nobody made."""
    with pytest.raises(RunError, match=r"main\.md is not there; run `make reproduce`"):
        pages.filled(PAGE, tmp_path)
    with pytest.raises(RunError, match=r"claims_arms.csv is not there; run `make reproduce`"):
        pages.filled("<!-- arms safety -->\n<!-- end -->", tmp_path)


def test_the_command_writes_all_pages(tmp_path, monkeypatch, capsys):
    """Guards `make readme`."""
    monkeypatch.setattr(pages, "root", lambda: tmp_path)
    for name in pages.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PAGE)
    with pytest.raises(SystemExit, match=r"^error: .*main\.md is not there"):
        pages.main()
    with_table(tmp_path, "| new |")
    pages.main()
    assert all("| new |" in (tmp_path / name).read_text() for name in pages.PAGES)


def test_the_front_page_shows_arms_and_what_their_budget_means(tmp_path):
    """Guards counts read as shares, and the printed algorithm judged by our constraint alone."""
    row = dict(regime="safety", n_prompts=10, abstained=1, policy_tokens=63.4, scorer_calls=7.6)
    row |= dict(answered_path_safe_low=0.1, answered_path_safe_high=0.9, safety_rate=0.25)
    row |= dict(own_constraint_kept=8)
    rows = [
        row | {"arm": arm, "answered_path_safe": i / 10, "reward_mean": 0.5 - 0.01 * i}
        for i, arm in enumerate(pages.FRONT)
    ]
    (tmp_path / "figures/tables").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(tmp_path / "figures/tables/claims_arms.csv")
    budgets = [{"regime": "safety", "budget": 0.5, "at_a_word": 0.02, "empty": 0.3104}]
    pd.DataFrame(budgets).to_csv(tmp_path / "figures/tables/claims_budgets.csv")
    table = pages.arms("safety", tmp_path).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:9]]
    assert cells[0] == ["base", "25.0", "0.0 [10.0, 90.0]", "1", "0.500", "63", "8"]
    assert cells[-1][2] == "60.0 [10.0, 90.0]" and cells[-1][4] == "0.440"
    assert table[-1].startswith("10 prompts of the regime *safety*")
    assert "budget is 0.5: 2 % of harmless answers" in table[-1] and "costs 0.310" in table[-1]
    assert "Plain answers exceed it for 10 of 10 prompts. " in table[-1]
    assert table[-1].endswith(
        "keeps its own constraint, the summed costs of blocks, for 8 prompts."
    )


def test_the_outside_judge_is_the_one_that_the_params_file_names(tmp_path):
    """Bug: where it had not read the answers, another judge's counts stood beside its verdict."""
    tables = [
        f"figures/tables/{name}.csv" for name in ("claims", "claims_arms", "harm", "harm_judges")
    ]
    for name in ("params/small/harm.yaml", *tables):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert "(llama-labels:qwen2.5-coder-1.5b, AUROC 0." in pages.outside_judge("harm", tmp_path)
    arms = pd.read_csv(tmp_path / "figures/tables/claims_arms.csv")
    arms["answered_path_safe"] = [0.5] * len(arms)  # 30 of 60
    arms.to_csv(tmp_path / "figures/tables/claims_arms.csv")
    said = pages.outside_judge("harm", tmp_path)
    assert "19 answers harmful (if harmless: 15 by labels, corrected share 0.27 [0.00, 0." in said
    assert "answers 30 within the budget and 26 over it, and abstains from 4. Without" in said
    assert "Without it, 30 answers are over it; beam search with a tuned λ answers 30 " in said
    harm = pd.read_csv(tmp_path / "figures/tables/harm.csv")
    others = harm[~harm["judge"].str.startswith("llama-labels")]
    others.to_csv(tmp_path / "figures/tables/harm.csv")
    with pytest.raises(RunError, match="has not read base and InferenceGuard, M 4; start its"):
        pages.outside_judge("harm", tmp_path)


def test_the_output_of_a_page_is_what_its_first_block_prints(tmp_path):
    """Bug: a printed answer typed by hand, or one of another block."""
    block = "```python\nprint(6 * 7)\n```\n```python\nprint(0)\n```\n"
    page = block + "<!-- output page.md -->\n<!-- end -->\n"
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    written = pages.filled(page, tmp_path)
    assert written == block + "<!-- output page.md -->\n\n```\n42\n```\n\n<!-- end -->\n"


def test_the_tree_of_the_front_page_is_that_of_its_answer(tmp_path):
    """Guards a picture of another search than the one beside it."""
    (tmp_path / "docs").mkdir()
    code = "class Answer:\n    tree = lambda self, masked: self\n"
    code += "    _repr_svg_ = lambda self: '<svg/>'\n"
    page = f"```python\n{code}answer = Answer()\n```\n<!-- output page.md -->\n<!-- end -->\n"
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    pages.filled(page, tmp_path)
    assert (tmp_path / pages.TREE).read_text() == "<svg/>\n"
