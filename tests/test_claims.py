"""Claims: every verdict by hand, power by enumeration, and every way a file can be wrong."""

import itertools
import json
import math
import sys

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import record

from igcore.errors import ParameterError, RunError
from igstudy.prompts import SPLITS, split_of
from igstudy.report import claims, decidable, deciding, paired, power
from igstudy.report import statistics as metrics
from igstudy.runs import register

REGIME = {
    "about": "prompts of a test",
    "policy": "smollm2-raw",
    "prompts": "set",
    "split": split_of("a prompt"),
    "n_prompts": 20,
    "seed": 7,
    "budget": 0.2,
    "pilot": {"seed": 2},
    "arms": {
        "ours": {"method": "inferenceguard"},
        "beam": {"method": "beam-lagrangian"},
        "best": {"method": "best-of-n"},
    },
}
PATH = "answered and path-safe"
CLAIM = {
    "sentence": "It is safest.",
    "source": "section 6",
    "falsified": "beam is as safe",
    "regime": "hard",
    "arm": "ours",
    "references": ["beam"],
    "outcomes": {PATH: 0.2},
}


@pytest.fixture
def written(tmp_path):
    def written(hard=None, claims_=None, **changes):
        content = {
            "seen": "nothing",
            "regimes": {"hard": REGIME | (hard or {})},
            "claims": claims_ or {"safest": CLAIM | changes},
        }
        path = tmp_path / "claims.yaml"
        path.write_text(json.dumps(content))
        return path

    return written


def cell(method, safe, rewards=None, **fields):
    """Return lines of an arm: whether each keeps to the budget at every word, and its reward."""
    rows = []
    for k, kept in enumerate(safe):
        line = record(method=method, prompt_id=f"p{k:02}", policy="smollm2-raw", seed=7, **fields)
        line |= {"prompts": "set", "policy_tokens": {"inferenceguard": 30}.get(method, 40)}
        line["reward"] = 0.5 if rewards is None else rewards[k]
        # the search may have had another budget than the regime, as the literal algorithm has
        rows.append(line | {"word_peak_cost": 0.1 if kept else 0.9, "budget": 1.0})
    return pd.DataFrame(rows)


def decided(path, ours, beam, best=()):
    lines = pd.concat([cell("inferenceguard", *ours), cell("beam-lagrangian", *beam)])
    lines = pd.concat([lines, cell("best-of-n", *(best or [NONE]))])
    return deciding.decide(claims.load_claims(path), lines)


# --- verdicts -------------------------------------------------------------------------------------

ALL, NONE = [True] * 20, [False] * 20


def test_a_clear_difference_holds_and_its_opposite_fails(written):
    """Guards the direction: a claim must not hold where the paper's rival wins."""
    table = decided(written(), [ALL], [NONE])
    (row,) = table.itertuples(index=False)
    assert (row.difference, row.n_prompts, row.verdict) == (1, 20, "held")
    assert row.p == row.p_holm == stats.binomtest(20, 20).pvalue
    assert (row.low, row.high) == metrics.difference_of_rates(20, 0, 20)
    assert (row.tokens, row.reference_tokens) == (30, 40)
    assert decided(written(), [NONE], [ALL])["verdict"].tolist() == ["failed"]
    said = {"claim": "safest", "under": "hard", "measured": PATH, "verdict": "held"}
    said |= {"the arm": "ours: 20 of 20", "the nearest rival": "beam: 0 of 20"}
    said |= {"difference": f"+1.000 [{row.low:.3f}, 1.000]".replace("0.", ".")}
    assert deciding.in_words(table).to_dict("records") == [said]
    failed = deciding.in_words(decided(written(), [NONE], [ALL]))
    assert failed["verdict"].tolist() == ["failed: beam is as safe"]


def test_in_words_the_nearest_rival_is_shown(written):
    """Bug: the easiest rival is shown, or of fewer tokens the one that saves most."""
    rivals = {"references": ["beam", "best"]}
    table = decided(written(**rivals), [ALL], [NONE], [[True] * 12 + [False] * 8])
    (said,) = deciding.in_words(table).to_dict("records")
    assert said["the nearest rival"] == "best: 12 of 20"
    lines = pd.concat([cell("inferenceguard", ALL), cell("beam-lagrangian", ALL)])
    lines = pd.concat([lines, cell("best-of-n", ALL).assign(policy_tokens=35)])
    file = claims.load_claims(written(outcomes={"policy tokens": 1}, **rivals))
    (said,) = deciding.in_words(deciding.decide(file, lines)).to_dict("records")
    assert (said["the arm"], said["the nearest rival"]) == ("ours: 30.000", "best: 35.000")
    assert said["difference"].startswith("-5.000 [")


def test_every_reference_must_be_beaten(written):
    """Bug: a claim held by its easiest rival, or by the p value of that one alone."""
    path = written(references=["beam", "best"])
    table = decided(path, [ALL], [NONE], [[True] * 12 + [False] * 8])
    p = stats.binomtest(8, 8).pvalue
    assert table["p_holm"].tolist() == [pytest.approx(p)] * 2
    assert table["verdict"].tolist() == ["held"] * 2 and table["reference"].tolist() == [
        "beam",
        "best",
    ]
    assert decided(path, [ALL], [NONE], [ALL])["verdict"].tolist() == ["failed"] * 2


def test_one_outcome_is_enough_at_a_price(written):
    """Bug: two chances to beat a rival cost nothing, or a loss in one outcome counts as a gain."""
    rewards = 0.5 + np.random.default_rng(3).normal(0.1, 0.1, 20)
    path = written(outcomes={PATH: 0.2, "reward": 0.05})
    table = decided(path, [ALL, rewards], [ALL])
    verdict, reward = table.itertuples(index=False)
    assert verdict.p == 1 and reward.p_holm == 2 * reward.p < metrics.ALPHA
    assert table["verdict"].tolist() == ["held"] * 2
    lost = decided(path, [ALL, 1 - rewards], [ALL])
    assert lost["verdict"].tolist() == ["failed"] * 2 and lost["p_holm"].min() == 1


def test_too_few_prompts_resolve_nothing(written):
    """Guards "failed" where an interval still holds a difference that matters."""
    assert decided(written(), [[True] * 3 + NONE[3:]], [NONE])["verdict"].tolist() == [
        "not resolved"
    ]
    # no difference, and the interval [-.16, .16] leaves out .2
    assert decided(written(), [ALL], [ALL])["verdict"].tolist() == ["failed"]
    assert decided(written(outcomes={PATH: 0.1}), [ALL], [ALL])["verdict"].tolist() == [
        "not resolved"
    ]


def test_a_difference_too_small_to_matter_has_failed(written):
    """Guards a claim that holds by the number of its prompts alone."""
    gains = np.random.default_rng(0).normal(0.02, 0.005, 20)
    for matters, verdict in ((0.2, "failed"), (0.02, "held")):
        path = written(outcomes={"reward": matters})
        table = decided(path, [ALL, 0.5 + gains], [ALL])
        assert table["verdict"].tolist() == [verdict] and table["p"][0] < 0.001


def test_holm_is_over_the_claims_alone(written):
    """Guards a family that other comparisons enter, and one without correction."""
    gains = np.random.default_rng(1).normal(0.1, 0.2, 20)
    named = {"one": CLAIM, "two": CLAIM | {"outcomes": {"reward": 0.2}}}
    table = decided(written(claims_=named), [ALL, 0.5 + gains], [[True] * 14 + [False] * 6])
    assert table["p_holm"].tolist() == metrics.holm(table["p"]).tolist()
    assert table["p_holm"].min() == 2 * table["p"].min() < metrics.ALPHA


def test_prompts_without_an_answer(written):
    """Guards a reward of abstentions: a prompt counts where both arms answered."""
    lines = pd.concat([cell("inferenceguard", ALL), cell("beam-lagrangian", ALL)])
    lines.loc[lines["prompt_id"] < "p05", "status"] = "abstained"
    path = written(outcomes={"reward": 0.2})
    (row,) = deciding.decide(claims.load_claims(path), lines).itertuples(index=False)
    assert row.n_prompts == 15 and row.verdict == "failed"  # a difference of 0 everywhere
    lines["status"] = "abstained"
    (row,) = deciding.decide(claims.load_claims(path), lines).itertuples(index=False)
    assert row.n_prompts == 0 and row.verdict == "not resolved"
    safest = deciding.decide(claims.load_claims(written()), lines)
    assert safest["difference"].tolist() == [0]  # an abstention is no safe answer


def test_a_text_without_a_cost_is_not_safe():
    """Guards a failed scorer that makes an answer safe."""
    lines = cell("base", [True, True]).assign(word_peak_cost=[math.nan, 0.1], budget=0.2)
    assert paired.answered_path_safe(lines).tolist() == [False, True]


# --- power ----------------------------------------------------------------------------------------


def test_power_of_mcnemar_by_enumeration():
    """Guards the power: all outcomes of nine prompts, each tested by scipy."""
    n, discordant, difference, alpha = 9, 0.6, 0.5, 0.05
    higher = (discordant + difference) / 2
    shares = {1: higher, -1: discordant - higher, 0: 1 - discordant}
    expected = 0.0
    for counts in itertools.product(range(n + 1), repeat=2):
        b, c = counts
        if 0 < b + c <= n and stats.binomtest(b, b + c).pvalue <= alpha:
            expected += stats.multinomial.pmf([b, c, n - b - c], n, list(shares.values()))
    found = power.power_of_verdicts(n, discordant, difference, alpha)
    assert found == pytest.approx(expected, rel=1e-9) and 0.1 < found < 0.9


def test_power_of_a_mean_by_simulation():
    """Guards the level and the sides of the test."""
    n, sd, difference, alpha = 40, 0.1, 0.04, 0.01
    draws = np.random.default_rng(0).normal(difference, sd, (20_000, n))
    share = (stats.ttest_1samp(draws, 0, axis=1).pvalue <= alpha).mean()
    assert power.power_of_mean(n, sd, difference, alpha) == pytest.approx(share, abs=0.01)
    assert power.power_of_mean(n, 0.0, difference, alpha) == 1  # tokens that differ by as many
    # Bug: a far tail without a number made the power of a large effect NaN
    assert power.power_of_mean(156, 0.19, 0.12, 0.05 / 6) == pytest.approx(1, abs=1e-6)


def test_plan_says_how_many_prompts_would_do(written):
    """Guards a claim that promises what its prompts cannot show."""
    rng = np.random.default_rng(2)
    named = {"one": CLAIM, "two": CLAIM | {"outcomes": {"reward": 0.05}}}
    file = claims.load_claims(written(claims_=named))
    ours = cell("inferenceguard", ALL, 0.5 + rng.normal(0, 0.1, 20))
    pilot = pd.concat([ours, cell("beam-lagrangian", [True] * 15 + [False] * 5)])
    with pytest.raises(RunError, match="seed 2"):
        power.planned(file, pilot)
    pilot["seed"] = 2
    one, two = power.planned(file, pilot).itertuples(index=False)
    discordant = 0.2 + 2 * (1 - 0.025 ** (1 / 20))  # none of the pilot's prompts was against it
    assert one.discordant == pytest.approx(discordant) and one.n_pilot == two.n_pilot == 20
    found = power.power_of_verdicts(20, discordant, 0.2, 0.025)
    assert one.power == pytest.approx(found) and found < 0.9
    assert two.power == power.power_of_mean(20, two.sd, 0.05, 0.025) < 0.9
    for row, of in (
        (one, lambda n: power.power_of_verdicts(n, discordant, 0.2, 0.025)),
        (two, lambda n: power.power_of_mean(n, two.sd, 0.05, 0.025)),
    ):
        assert of(row.n_needed) >= 0.9 > of(row.n_needed * 3 // 4)
    assert power.prompts_needed(lambda n: 0.0, 100, most=1000) >= 1000


# --- several regimes, and estimates ---------------------------------------------------------------


def two_regimes(written, **changes):
    """Write claims about prompts of two sets, hard and mild."""
    path = written(**changes)
    content = json.loads(path.read_text())
    content["regimes"]["mild"] = REGIME | {"prompts": "other"}
    for claim in (content["claims"] | content.get("estimates", {})).values():
        claim["regime"] = ["hard", "mild"]
    path.write_text(json.dumps(content))
    return path


def test_a_claim_must_hold_in_each_of_its_regimes(written):
    """Bug: the regime with the larger difference, or the first one, decides a claim about two."""
    path = two_regimes(written)
    rival = cell("beam-lagrangian", NONE)
    hard = pd.concat([cell("inferenceguard", ALL), rival])
    for ours, verdict in ((ALL, "held"), (NONE, "failed"), (ALL[:2] + NONE[2:], "not resolved")):
        mild = pd.concat([cell("inferenceguard", ours), rival]).assign(prompts="other")
        table = deciding.decide(claims.load_claims(path), pd.concat([hard, mild]))
        assert table["regime"].tolist() == ["hard", "mild"]
        assert table["difference"].tolist() == [1, sum(ours) / 20]
        assert set(table["verdict"]) == {verdict}
    content = json.loads(path.read_text())
    content["claims"]["safest"]["regime"] = ["hard", "easy"]
    path.write_text(json.dumps(content))
    with pytest.raises(ParameterError, match="regime of claim 'safest' 'easy'"):
        claims.load_claims(path)


def test_an_estimate_is_measured_and_decides_nothing(written):
    """Bug: an estimate gets a verdict, or its p value enters the correction of the claims."""
    path = written()
    content = json.loads(path.read_text())
    content["estimates"] = {"other": CLAIM | {"references": ["best"]}}
    path.write_text(json.dumps(content))
    file = claims.load_claims(path)
    rivals = [cell("beam-lagrangian", NONE), cell("best-of-n", HALF)]
    lines = pd.concat([cell("inferenceguard", ALL), *rivals])
    (row,) = deciding.decide(file, lines).itertuples(index=False)
    assert row.claim == "safest" and row.p_holm == row.p
    (row,) = deciding.estimated(file, lines).to_dict("records")
    assert (row["claim"], row["reference"], row["difference"]) == ("other", "best", 0.5)
    assert not {"verdict", "p_holm"} & row.keys()
    assert len(deciding.estimated(claims.load_claims(written()), lines)) == 0


def test_outcomes_in_units_of_the_length_by_hand(written):
    """Bug: an answer counts past its cap or over budget, or an abstention has a reward."""
    lines = cell("inferenceguard", [True, True, True, False], [0.4, 0.5, 0.6, 0.7])
    lines = lines.assign(budget=0.2, max_new_tokens=20, policy_tokens=[40, 41, 160, 10])
    lines.loc[1, "status"] = "abstained"
    expected = {
        "answered within 2 L": [True, False, False, False],
        "answered within 8 L": [True, False, True, False],
        "reward, 0 unless path-safe": [0.4, 0, 0.6, 0],
        "policy tokens in L": [2, 2.05, 8, 0.5],
    }
    for name, values in expected.items():
        assert claims.CLAIM_OUTCOMES[name].measure(lines).tolist() == values


# --- claims that could go either way --------------------------------------------------------------

HALF = [True] * 10 + [False] * 10


def test_a_claim_with_room_and_prompts_is_decidable(written):
    """Bug: a claim that an arm can win or lose is refused, or one without power is not."""
    lines = pd.concat([cell("inferenceguard", ALL), cell("beam-lagrangian", HALF)])
    for n, why in ((200, ""), (20, "its power against 'beam' under hard is 0.")):
        file = claims.load_claims(written({"n_prompts": n, "pilot": {"n_prompts": 20}}))
        (row,) = decidable.decidable(file, lines).itertuples(index=False)
        assert (row.perfect, row.useless, row.level) == (1, 0.5, 0.05)
        assert (row.perfect_verdict, row.useless_verdict) == ("held", "failed")
        assert row.why.startswith(why) and bool(row.why) == bool(why)
        assert (row.power >= 0.9) == (not why)


def test_a_pilot_without_an_accepted_answer_decides_nothing(written):
    """Bug: a claim about rewards that no answer of the pilot has is called lost, or decidable."""
    file = claims.load_claims(written({"pilot": {"n_prompts": 20}}, outcomes={"reward": 0.1}))
    lines = pd.concat([cell("inferenceguard", NONE), cell("beam-lagrangian", NONE)])
    (row,) = decidable.decidable(file, lines).itertuples(index=False)
    assert row.why == "no pilot run has its outcomes"


def test_the_perfect_arm_by_hand(written):
    """Bug: an answer over budget sets the best reward, or a search the tokens of one sample."""
    arms = REGIME["arms"] | {"plain": {"method": "base"}}
    regime = claims.load_claims(written({"arms": arms, "n_prompts": 3})).regimes["hard"]
    searches = [
        cell("inferenceguard", [True, True, False], [0.1, 0.6, 0.9]),
        cell("beam-lagrangian", [True, False, False], [0.4, 0.8, 0.9]),
    ]
    lines = pd.concat(searches)  # of two arms nothing is known
    assert decidable.perfect(regime, "reward", lines).to_dict() == {"p00": 0.4, "p01": 0.6}
    assert set(decidable.perfect(regime, "policy tokens", lines)) == {30}
    lines = pd.concat([*searches, cell("base", NONE[:3])])  # a sample of 40 tokens
    assert set(decidable.perfect(regime, "policy tokens", lines)) == {40}
    assert set(decidable.perfect(regime, PATH, lines)) == {1}


def test_a_pilot_is_repeated_or_thinned_alike():
    """Bug: the first prompts of a pilot count more often, or those without an outcome go."""
    gains = pd.Series([1.0, np.nan, 0.0, 0.0])
    for n, expected in ((8, [0, 0, 0, 0, 1, 1, np.nan, np.nan]), (2, [0, np.nan])):
        assert decidable.scaled(gains, n).tolist() == pytest.approx(expected, nan_ok=True)


def test_fewer_tokens_are_better(written):
    """Bug: more tokens held a claim about tokens."""
    path = written(outcomes={"policy tokens": 5})
    for ours, verdict in ((30, "held"), (50, "failed")):
        lines = pd.concat([cell("inferenceguard", ALL), cell("beam-lagrangian", ALL)])
        lines.loc[lines["method"] == "inferenceguard", "policy_tokens"] = ours
        (row,) = deciding.decide(claims.load_claims(path), lines).itertuples(index=False)
        assert (row.difference, row.better, row.verdict) == (ours - 40, "lower", verdict)


def test_the_command_registers_what_is_decidable_alone(written, tmp_path, monkeypatch, capsys):
    """Bug: claims without room are registered, or an edited file in the place of another."""
    lines = pd.concat([cell("inferenceguard", ALL), cell("beam-lagrangian", HALF)])
    lines = lines.assign(seed=2, prompts="other")
    monkeypatch.setattr(register, "load_finished", lambda profile, pattern: lines)
    folder, pilot = tmp_path / "kept", {"seed": 2, "prompts": "other", "n_prompts": 20}

    def called(hard):
        monkeypatch.setattr(sys, "argv", ["register", str(written(hard)), "tune", str(folder)])
        register.main()

    with pytest.raises(SystemExit, match="error: claim 'safest' cannot go either way: its power"):
        called({"pilot": pilot})
    assert not folder.exists()
    with pytest.raises(SystemExit, match="error: the claims ask for 21 prompts of 'ours'"):
        called({"pilot": pilot | {"n_prompts": 21}})
    for changed, shared in (({"seed": 7}, "seed 7"), ({"prompts": "set"}, "split ")):
        with pytest.raises(SystemExit, match=f"regime 'hard' of .* has the {shared}.*of its pilot"):
            called({"pilot": pilot | changed})
    large = {"n_prompts": 200, "pilot": pilot}
    called(large)
    assert {path.name for path in folder.iterdir()} == {"registered.json", "decidable.csv"}
    assert "safest: decidable" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is not the file that was registered before its runs"):
        called(large | {"about": "other prompts"})


# --- bad files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regime", "changes", "sentence"),
    [
        ({"split": "tests"}, {}, "unknown split 'tests'; did you mean 'test'"),
        ({"arms": REGIME["arms"] | {"x": {"methd": 1}}}, {}, "did you mean 'method'"),
        ({"arms": REGIME["arms"] | {"x": {"method": "beams"}}}, {}, "unknown method of arm 'x'"),
        ({"arms": REGIME["arms"] | {"x": {"rounds": 1}}}, {}, "unknown method of arm 'x'"),
        ({"pilot": {"sed": 2}}, {}, "unknown parameter 'sed'; did you mean 'seed'"),
        ({"pilot": {"split": "tain"}}, {}, "unknown split 'tain'; did you mean 'train'"),
        ({}, {"arm": "our"}, "unknown arm of claim 'safest' 'our'; did you mean 'ours'"),
        ({}, {"regime": "soft"}, "unknown regime of claim 'safest' 'soft'"),
        ({}, {"references": ["bean"]}, "unknown arm of claim 'safest' 'bean'; did you mean 'beam'"),
        ({}, {"references": []}, "references is"),
        ({}, {"outcomes": {"rewards": 1}}, "'rewards'; did you mean 'reward'"),
        ({}, {"outcomes": {"reward": 0}}, "outcomes.* is 0: it must be greater than 0"),
        ({}, {"note": ""}, "unknown parameter 'note'"),
    ],
)
def test_what_a_file_names_wrongly_is_named(written, regime, changes, sentence):
    with pytest.raises(ParameterError, match=sentence):
        claims.load_claims(written(regime, **changes))


def test_files_that_are_no_claims(tmp_path, written):
    path = tmp_path / "claims.yaml"
    for content in (
        None,
        "",
        "- 1",
        "seen: x",
        "seen: x\nregimes: 3\nclaims: {}",
        "a: [",
        b"\xff",
        "[" * 10**5,
    ):
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ParameterError, match="cannot be read|; it must have seen, regimes"):
            claims.load_claims(path)
    with pytest.raises(ParameterError, match="has 7 claims; name at most 6"):
        claims.load_claims(written(claims_={f"c{i}": dict(CLAIM) for i in range(7)}))


def test_missing_lines_are_named(written):
    file = claims.load_claims(written())
    ours, beam = cell("inferenceguard", ALL), cell("beam-lagrangian", ALL)
    for lines in (ours, pd.concat([ours, beam[:19]]), pd.concat([ours, beam.assign(seed=0)])):
        with pytest.raises(RunError, match="ask for 20 prompts of 'beam' .*decode what is missing"):
            deciding.decide(file, lines)
    other = next(split for split in SPLITS if split != REGIME["split"])
    file = claims.load_claims(written({"split": other}))
    with pytest.raises(RunError, match=f"ask for prompts of the split '{other}', and 'ours' has"):
        deciding.decide(file, pd.concat([ours, beam]))


def test_an_edited_file_decides_nothing(written, tmp_path):
    """Guards claims made to fit their results."""
    folder = tmp_path / "runs" / "claims"
    file = claims.load_claims(written())
    with pytest.raises(RunError, match="does not say which claims were registered"):
        register.check_registered(file, folder)
    register.register(file, folder)
    register.register(file, folder)  # again, as every later start does
    edited = claims.load_claims(written(outcomes={PATH: 0.1}))
    for check in (register.register, register.check_registered):
        with pytest.raises(RunError, match="is not the file that was registered before its runs"):
            check(edited, folder)
    (folder / "registered.json").write_text(json.dumps([1]))
    with pytest.raises(RunError, match="does not say which claims were registered"):
        register.register(file, folder)
