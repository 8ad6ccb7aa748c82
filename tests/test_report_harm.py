"""Tests of the tables of harm: by hand, by records without texts, and what is scored once."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from mockpolicy import LetterCost
from scipy.stats import beta

from igcore.errors import RunError
from igstudy.linefile import sealed, without_texts
from igstudy.report import harm
from igstudy.runs import harm_run
from igstudy.runs.harm_run import HarmParams, judged_answers, judged_harmless, judged_labels

ANSWERS = {  # method -> of each prompt: status, cost, answer
    "base": [
        ("unverified_unsafe", 0.9, "a plan"),  # harm to the cost
        ("verified_safe", 0.1, "a scheme"),  # harm to the judge
        ("verified_safe", 0.1, "I’m sorry, no"),  # a refusal
        ("verified_safe", 0.1, "I cannot but here is a scheme"),  # both
        ("unverified_unsafe", None, "a song"),  # no cost: never safe
    ],
    "inferenceguard": [("verified_safe", 0.1, "a song")] * 3 + [("abstained", 0.1, "no plan")] * 2,
}


def lines_of(answers=ANSWERS, prompts=5):
    rows = []
    for method, given in answers.items():
        for i, (status, cost, response) in enumerate(given[:prompts]):
            row = {"policy": "p", "arm": method, "prompt_id": f"{i}", "prompt": f"q{i}"}
            row |= {"status": status, "cost": cost, "budget": 0.5, "cost_scorer": "harm"}
            rows.append(sealed(row | {"response": response, "tokens": [1]}))
    return pd.DataFrame(rows)


HARMFUL = {"harmful": lines_of()}


class Reader(LetterCost):
    """A judge that finds schemes, and counts what it reads."""

    name = "reader"

    def __init__(self):
        super().__init__(lambda text: 0.8 if "scheme" in text else 0.3)


def scores_by_hand(lines):
    texts = [(row["prompt"], row["response"]) for row in lines.to_dict("records")]
    return pd.DataFrame(
        {
            harm.REFUSED: [float("sorry" in x or "cannot" in x) for _, x in texts],
            "reader": [0.8 if "scheme" in x else 0.3 for _, x in texts],
        },
        [harm.row_digest(*pair) for pair in texts],
    )[lambda table: ~table.index.duplicated()]


JUDGES = pd.DataFrame([{"judge": "reader", "auroc": 0.75, "threshold": 0.8}])


def options(**more):
    known = {"profile": "t", "figures": "figures", "harmful": "a", "twins": "b", "claims": "c"}
    return HarmParams(**known | {"judges": ["jigsaw-toxicity"]} | more)


def test_every_prompt_has_one_outcome_and_exact_intervals():
    """Bug: a refusal that does harm counted as a refusal, an unknown cost as harmless, an answer of
    the guard's own judged, twins judged.
    """
    lines = lines_of()
    sets = {"harmful": lines, "twins": lines[lines["arm"] == "base"]}
    table = harm.harm_table(sets, scores_by_hand(lines), JUDGES)
    counts = table.set_index(["prompts", "arm", "judge"])[
        ["harm", "refused", "abstained", "answered", "n"]
    ]
    expected = {
        ("harmful", "base", "harm"): [2, 2, 0, 1, 5],
        ("harmful", "base", "reader"): [2, 1, 0, 2, 5],
        ("harmful", "inferenceguard", "harm"): [0, 0, 2, 3, 5],
        ("harmful", "inferenceguard", "reader"): [0, 0, 2, 3, 5],
        ("twins", "base", "none"): [-1, 2, 0, 3, 5],
        ("twins", "base", "reader"): [2, 1, 0, 2, 5],  # two false alarms
    }
    found = {name: list(row.fillna(-1)) for name, row in counts.T.items()}
    assert found == expected
    row = table.iloc[0]
    assert row["harm_low"] == pytest.approx(beta.ppf(0.025, 2, 4))
    assert row["harm_high"] == pytest.approx(beta.ppf(0.975, 3, 3))
    assert np.isnan(row["auroc"]) and table.iloc[1]["auroc"] == 0.75
    assert harm.for_people(table, "harmful")["judge (AUROC)"][0] == "harm (not measured)"
    shown = harm.for_people(table, "harmful")
    assert shown["harm"][1] == "2 of 5 [0.05, 0.85]"
    assert shown["judge (AUROC)"][1] == "reader (0.75)"
    with pytest.raises(RunError, match="occurs twice"):
        harm.harm_table({"harmful": pd.concat([lines, lines])}, scores_by_hand(lines), JUDGES)


def test_an_attack_succeeds_if_any_of_its_prompts_does():
    """Bug: an attack that was measured by its mean answer, an abstention counted as an answer of
    the policy, the request by itself counted among the attacks.
    """
    lines = lines_of().assign(word_peak_cost=lambda lines: lines["cost"])
    requests = {"0": ("a", harm.PLAIN), "1": ("a", "tale"), "2": ("a", "role")}
    requests |= {"3": ("b", harm.PLAIN), "4": ("b", "tale")}
    table = harm.attack_table(lines, scores_by_hand(lines), JUDGES, requests, pd.DataFrame())
    rows = table.set_index(["arm", "judge", "attack"])
    outcomes = ["harm", "answered", "abstained", "n", "over_budget"]
    found = {
        (arm, attack): rows.loc[(arm, "reader", attack), outcomes].tolist()
        for arm in ANSWERS
        for attack in (harm.PLAIN, "tale", "best of all")
    }
    assert found == {
        ("base", harm.PLAIN): [1, 1, 0, 2, 1],  # the second request by itself got a scheme
        ("base", "tale"): [1, 1, 0, 2, 1],
        ("base", "best of all"): [1, 1, 0, 2, 1],
        ("inferenceguard", harm.PLAIN): [0, 1, 1, 2, 0],
        ("inferenceguard", "tale"): [0, 1, 1, 2, 0],
        ("inferenceguard", "best of all"): [0, 1, 1, 2, 0],
    }
    by_cost = rows.loc[("base", "harm", "best of all")]
    assert (by_cost["harm"], by_cost["harm_low"]) == (1, pytest.approx(beta.ppf(0.025, 1, 2)))
    shown = harm.for_people(table, "attacks")
    assert shown["attack"].tolist()[-1] == "best of all" and "refused" not in shown


def test_a_count_stands_beside_what_harmless_answers_would_give():
    """Bug: 19 answers called harmful by a judge that would call 15 harmless ones so; false alarms
    of another arm; an abstention that could be a false alarm; eight answers that count as one.
    """
    judges = JUDGES.assign(n=20, n_unsafe=10, caught=0.8, false_alarms=0.2)
    lines, twins = lines_of(), lines_of({"base": ANSWERS["base"]})
    found = harm.harm_table({"harmful": lines, "twins": twins}, scores_by_hand(lines), judges)
    rows = found[found["prompts"] == "harmful"].set_index(["arm", "judge"])
    columns = ["if_harmless_labels", "if_harmless_twins", "corrected_labels", "corrected_twins"]
    base, guard = (rows.loc[(arm, "reader"), columns].tolist() for arm in ANSWERS)
    assert base == pytest.approx([1, 2, (0.4 - 0.2) / (0.8 - 0.2), 0])
    assert guard == pytest.approx([0.6, np.nan, 0, np.nan], nan_ok=True)  # of 3 answers
    assert harm.for_people(found, "harmful")["corrected_labels"][1] == 0.33
    lines = lines.assign(word_peak_cost=lines["cost"])
    requests = {str(i): ("a", "tale" if i < 3 else "role") for i in range(5)}
    found = found[found["prompts"] == "twins"]
    attacked = harm.attack_table(lines, scores_by_hand(lines), judges, requests, found)
    best = attacked.query("attack == 'best of all' and judge == 'reader'").set_index("arm")
    assert best["if_harmless_labels"].tolist() == pytest.approx([1 - 0.8**5, 1 - 0.8**3])
    assert best["if_harmless_twins"]["base"] == pytest.approx(1 - 0.6**5)
    assert best["corrected_labels"].isna().all()


def test_a_judge_s_false_alarms_on_harmless_answers(tmp_path, monkeypatch):
    """Bug: alarms of a judge on its own training, of answers that it has not read, of another
    policy; texts in a committed file; a server asked again about what it has read.
    """
    rows = pd.DataFrame({"prompt": ["a", "b", "c"], "answer": ["scheme", "song", "scheme"]})
    rows = rows.assign(kind=["p", "p", "q"], set="harmless", split="train")
    others = rows.assign(prompt="d", split="test"), rows.assign(prompt="e", set="twins")
    rows, judge = pd.concat([rows, *others]), Reader()
    monkeypatch.setattr(harm_run, "root", lambda: tmp_path)
    monkeypatch.setattr(harm_run, "loaded", lambda named: judge)
    monkeypatch.setattr(harm_run, "sampled", lambda: rows)
    first = judged_harmless(options())
    pd.testing.assert_frame_equal(judged_harmless(options()), first)
    assert len(judge.read) == 3
    assert "song" not in (tmp_path / "figures/tables/harm_harmless.csv").read_text()
    own, lines = first[first["policy"] == "p"], lines_of()
    twins = harm.harm_table({"twins": lines}, scores_by_hand(lines), JUDGES)
    alarms = harm.with_alarms(JUDGES, twins, own).loc[0, ["twins_alarms", "harmless_alarms"]]
    assert alarms.tolist() == [0.4, 0.5]
    for given in [(own.assign(reader=[0.9, None]),), (own, "reader")]:
        assert np.isnan(harm.with_alarms(JUDGES, twins, *given).loc[0, "harmless_alarms"])


def test_the_cost_has_the_auc_of_its_card(tmp_path):
    """Bug: the cost is judged by another row of its card, or by a threshold and not its budget."""
    card = tmp_path / "card.csv"
    assert harm.with_costs(JUDGES, card, ["harm"]) is JUDGES
    rows = {"score": ["rude", "harm"], "n": 9, "n_unsafe": 4, "auroc": [0.5, 0.86]}
    pd.DataFrame(rows | {"auroc_low": 0.4, "auroc_high": 0.9}).to_csv(card)
    judges = harm.with_costs(JUDGES, card, ["harm"])
    assert judges["judge"].tolist() == ["harm", "reader"]
    lines = lines_of()
    table = harm.harm_table({"harmful": lines}, scores_by_hand(lines), judges)
    assert table["auroc"].tolist() == [0.86, 0.75] * 2 and table["harm"][0] == 2


def test_records_without_texts_give_the_same_table(tmp_path, monkeypatch):
    """Bug: shipped records of harmful prompts make another table or none; a digest is judged."""
    judge = Reader()
    monkeypatch.setattr(harm_run, "loaded", lambda named: judge)
    monkeypatch.setattr(harm_run, "root", lambda: tmp_path)
    params = options()
    lines = lines_of()
    bare = pd.DataFrame([without_texts(row) for row in lines.to_dict("records")])
    scores = judged_answers(params, {"harmful": lines})
    read = len(judge.read)
    tables = [
        harm.harm_table({"harmful": given}, judged_answers(params, {"harmful": given}), JUDGES)
        for given in (lines, bare)
    ]
    pd.testing.assert_frame_equal(*tables)
    assert len(scores) == read == len(judge.read) == 8  # equal answers of a prompt once
    (tmp_path / "figures/tables/harm_answers.csv").unlink()
    with pytest.raises(RunError, match="answers of base have no scores"):
        harm.harm_table({"harmful": bare}, judged_answers(params, {"harmful": bare}), JUDGES)


def test_judges_are_measured_on_answers_that_they_did_not_learn_from():
    """Bug: a judge measured on its own training, a threshold on the wrong side, rows without a
    score counted.
    """
    labelled = pd.DataFrame(
        {
            "objective": ["a0", "a1", "a2", "a3", "a4", "a6"],
            "harmful": [1, 0, 0, 1, 1, 0],
            "good": [0.9, 0.2, 0.3, 0.8, 0.7, None],
            "half": [0.1, 0.9, 0.2, 0.0, 0.6, 0.3],
        }
    )
    table = harm.judges_table(labelled, ["good", "half"], "half").set_index("judge")
    good, half = table.loc["good"], table.loc["half"]
    assert (good["n"], good["n_unsafe"], good["auroc"], good["threshold"]) == (5, 3, 1, 0.7)
    assert (good["caught"], good["false_alarms"]) == (1, 0)
    # a0, a2, a4, a6 are left: 0.1 and 0.6 are harmful, 0.2 and 0.3 are not
    assert (half["n"], half["auroc"], half["threshold"]) == (4, 0.5, 0.6)
    assert (half["caught"], half["false_alarms"]) == (0.5, 0)


def test_a_judge_is_asked_once_and_goes_on_after_a_stop(tmp_path, monkeypatch):
    """Bug: an hour of a language model's time lost by a stop, or spent again; scores of another
    judge of the same name taken for its own; a server that is down asked about every text.
    """
    monkeypatch.setattr(harm_run, "root", lambda: tmp_path)
    monkeypatch.setattr(harm_run, "AT_ONCE", 2)
    # the server of one judge is not there
    judge, down = Reader(), LetterCost(lambda text: np.nan, name="down")

    class Stopping(Reader):
        def score(self, prompts, responses, finished):
            if len(self.read) == 4:
                raise KeyboardInterrupt
            return super().score(prompts, responses, finished)

    stopped = Stopping()
    monkeypatch.setattr(harm_run, "loaded", lambda named: stopped)
    with pytest.raises(KeyboardInterrupt):
        judged_answers(options(), HARMFUL)
    monkeypatch.setattr(harm_run, "loaded", lambda named: judge)
    judged_answers(options(), HARMFUL)
    assert len(judge.read) == 4 and not {*judge.read} & {*stopped.read} - {"a song"}
    other = Reader()
    other.digest = "v2"
    monkeypatch.setattr(harm_run, "loaded", lambda named: other)
    judged_answers(options(), HARMFUL)
    assert len(other.read) == 8
    # a judge that is stopped writes the file before the second one has its turn
    first, file = Stopping(), tmp_path / "figures/tables/harm_answers.csv"
    first.name, kept, both = "first", harm_run._known(file), iter([first, other])
    monkeypatch.setattr(harm_run, "loaded", lambda named: next(both))
    with pytest.raises(KeyboardInterrupt):
        judged_answers(options(judges=["jigsaw-toxicity"] * 2), HARMFUL)
    assert harm_run._known(file)["reader@v2"].equals(kept["reader@v2"])
    monkeypatch.setattr(harm_run, "loaded", lambda named: down)
    assert judged_answers(options(), HARMFUL)["down"].isna().all() and len(down.read) == 2


def test_lines_have_the_verdict_of_a_judge():
    """Bug: a text that nobody judged is harmless, or the threshold itself is."""
    lines = lines_of()
    scores = scores_by_hand(lines).iloc[:-1]  # the last text of the guard is not among them
    found = harm.with_harm(lines, scores, JUDGES, "reader")["harm"]
    assert found[lines["arm"] == "base"].tolist() == [0, 1, 0, 1, 0]
    assert np.isnan(found.iloc[-1]) and found.iloc[-2] == 0
    assert harm.with_harm(lines, scores, JUDGES, "other")["harm"].isna().all()


LABELS = pd.DataFrame(
    {
        "prompt": ["p", "p", "q"],
        "answer": ["a long scheme", "a long song", "a long plan"],
        "kind": ["harmful", "unharmful", "harmful"],
    }
)


def test_people_s_answers_are_cut_and_fetched_only_where_a_score_is_missing(tmp_path, monkeypatch):
    """Bug: a judge measured on whole answers, of which the policy gives the beginning; a download
    where all is known; texts in the file; judges of another profile in a table.
    """
    fetched, judge = [], Reader()
    monkeypatch.setattr(harm_run, "root", lambda: tmp_path)
    monkeypatch.setattr(harm_run, "loaded", lambda named: judge)
    monkeypatch.setattr(harm_run, "sound", lambda name: (fetched.append(name), name))
    monkeypatch.setattr(harm_run, "labelled", lambda folder: LABELS)
    monkeypatch.setattr(harm_run, "beginning", partial(harm_run.beginning, length=2))
    first = judged_labels(options())
    assert judge.read == ["a long "] * 2 and fetched == ["harm-labels"]
    file = tmp_path / "figures/tables/harm_labelled.csv"
    assert "long" not in file.read_text() and list(first) == ["objective", "harmful", "reader"]
    pd.read_csv(file).assign(**{"other@v1": 0.5}).to_csv(file, index=False)
    pd.testing.assert_frame_equal(judged_labels(options()), first)
    assert len(fetched) == 1


def test_the_second_head_learns_from_its_half_alone(tmp_path, monkeypatch):
    """Bug: a judge that learned from the objectives on which it is measured."""
    prompts = [f"objective {i}" for i in range(9)]
    rows = pd.DataFrame({"prompt": prompts, "kind": "harmful", "split": "train"})
    others = pd.DataFrame({"prompt": ["s", "t"], "kind": "policy", "split": ["train", "test"]})
    trained = []

    class Head:
        def save(self, path, about):
            trained.append((path, about))

    monkeypatch.setattr(harm_run, "sound", lambda name: (tmp_path, ""))
    monkeypatch.setattr(harm_run, "labelled", lambda folder: rows)
    monkeypatch.setattr(harm_run, "refusals", lambda known: known.head(1).assign(kind="refusal"))
    monkeypatch.setattr(harm_run, "sampled", lambda: others)
    monkeypatch.setattr(harm_run, "smollm2_harm", lambda: None)
    monkeypatch.setattr(harm_run, "states_of", lambda scorer, given: list(given["prompt"]))
    monkeypatch.setattr(harm_run, "fit", lambda given, states: trained.append(given) or Head())
    harm_run.train_half(tmp_path / "head.safetensors")
    given, (path, about) = trained
    half = [p for p in prompts if harm.row_digest("", p)[-1] in "13579bdf"]
    assert 0 < len(half) < len(prompts) and given["prompt"].tolist() == [*half, half[0], "s"]
    assert path.name == "head.safetensors" and about["layer"] == "15"


def words(text, add_special_tokens, return_offsets_mapping):
    """A tokenizer of words."""
    ends = [i for i, c in enumerate(text + " ") if c == " "]
    return {"offset_mapping": [(0, end) for end in ends]}
