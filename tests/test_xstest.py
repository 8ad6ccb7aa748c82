"""Tests of the answers to XSTest and of the card's rows from them, on files made up here."""

import hashlib

import numpy as np
import pandas as pd
import pytest

from igcore import AssetError
from igstudy import xstest
from igstudy.files import root
from igstudy.report import outside


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with prompts and one model's answers, whose digests are the known ones."""
    (tmp_path / "xstest_prompts.csv").write_text(
        "id,prompt,type,label,focus\n1,Why?,homonyms,safe,Kill \n2,How?,contrast,unsafe,kill\n"
    )
    (tmp_path / "xstest_v2_completions_gpt4.csv").write_text(
        "id,type,prompt,completion,final_label\n"
        "2,contrast,How?,,2_full_refusal\n1,homonyms,Why?,So.,1_full_compliance\n"
    )
    known = {
        path.name: ("0" * 64, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(tmp_path.iterdir())
    }
    monkeypatch.setattr(xstest, "FILES", known)
    monkeypatch.setattr(xstest, "COMPLETIONS", ["xstest_v2_completions_gpt4.csv"])
    return tmp_path


def test_an_answer_has_the_label_and_the_half_of_its_prompt(folder):
    """Guards the order of two files, an answer without text, and spaces around the focus, which
    would put a prompt and its contrast into two groups.
    """
    rows = xstest.load_xstest(folder)
    columns = ["model", "kind", "label", "group", "prompt", "answer"]
    assert rows[columns].values.tolist() == [
        ["gpt4", "unsafe", "refusal", "kill", "How?", ""],
        ["gpt4", "safe", "compliance", "kill", "Why?", "So."],
    ]
    even = int(hashlib.sha256(b"kill").hexdigest()[-1], 16) % 2 == 0
    assert set(rows["half"]) == {"even" if even else "odd"}


def test_other_files_are_refused_in_one_sentence(folder):
    """Guards figures of the card that came from another edition of the answers."""
    path = folder / "xstest_v2_completions_gpt4.csv"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(
        AssetError, match=r"gpt4.csv has sha256 \w{64} where 0{64} \(the publ.*half"
    ):
        xstest.load_xstest(folder)
    path.unlink()
    with pytest.raises(AssetError, match="gpt4.csv has sha256 none where"):
        xstest.load_xstest(folder)


# --- the rows of the card -------------------------------------------------------------------------


@pytest.fixture
def seen():
    """60 answers of two models; ``cost`` puts every unsafe compliance of a first."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "model": ["a"] * 40 + ["b"] * 20,
            "kind": ["unsafe", "safe"] * 30,
            "label": ["compliance"] * 40 + ["refusal"] * 16 + ["partial refusal"] * 4,
            "half": "even",
            "group": [f"g{i // 4}" for i in range(60)],
            "prompt": [f"p{i}" for i in range(60)],
            "answer": "x",
        }
    )
    cost = (rows["kind"] == "unsafe") + rng.random(60) / 2
    scores = {"cost": cost, "cost, highest": cost + 1, "noise": rng.random(60)}
    return outside.by_digest(rows, scores)


def test_what_is_kept_of_an_answer_is_no_text(seen):
    assert list(seen)[:6] == ["model", "kind", "label", "half", "group", "digest"]
    assert seen["digest"].nunique() == 60 and seen["digest"].str.fullmatch("[0-9a-f]{16}").all()
    assert seen["group"].nunique() == 15 and not seen["group"].str.startswith("g").any()


def test_compliances_alone_are_compared(seen):
    """Bug: refusals of unsafe prompts, which cost little, would hide that compliance costs more."""
    table = outside.quality(seen, ["cost", "noise"])
    assert table.loc["cost", ["xstest_even", "xstest_even_caught"]].tolist() == [1, 1]
    full = seen[seen["label"] == "compliance"]
    unsafe, safe = (full.loc[full["kind"] == kind, "noise"] for kind in ("unsafe", "safe"))
    won = unsafe.to_numpy()[:, None] > safe.to_numpy()
    assert table.loc["noise", "xstest_even"] == pytest.approx(won.mean())
    over = unsafe > np.quantile(safe, 0.9)
    assert table.loc["noise", "xstest_even_caught"] == pytest.approx(over.mean())


def test_shares_over_a_budget_name_the_length(seen):
    """Guards the peak at a word, partial refusals, which count nowhere, and both lengths."""
    answers = pd.DataFrame({"kind": ["chat", "chat"], "set": "twins", "split": "test"})
    costs = [np.array([0.1, 1.3]), np.array([1.4, 0.2])]
    harmless = [(48, (answers, costs[:1] * 2)), (128, (answers, costs))]
    table = outside.over_budget(seen, "cost", harmless, 1.2).set_index(["kind", "model", "tokens"])
    assert table.loc["harmless twins", "at_end"].to_dict() == {("chat", 48): 1, ("chat", 128): 0.5}
    assert table.loc["harmless twins", "at_a_word"].to_dict() == {("chat", 48): 1, ("chat", 128): 1}
    assert table.loc[("refusal", "b", 64), "n"] == 16
    unsafe = seen[(seen["kind"] == "unsafe") & (seen["label"] == "compliance")]
    row = table.loc[("compliance, unsafe prompt", "a", 64)]
    assert row["at_end"] == (unsafe["cost"] > 1.2).mean()
    assert row["at_a_word"] == (unsafe["cost"] > 0.2).mean() == 1


def test_the_card_has_the_committed_scores():
    """Bug: new scores were committed, and the card kept the figures of the old ones."""
    card = pd.read_csv(root() / "figures/tables/harm_heads.csv", index_col="head")
    found = outside.quality(outside.committed(), card.index)
    pd.testing.assert_frame_equal(found, card[list(found)], atol=1e-9)
