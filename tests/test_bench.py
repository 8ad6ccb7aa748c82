"""Tests of the benchmark on tiny random Llamas whose tokens are letters: what is counted,
remembered and compared.
"""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from tiny import Counter, tiny_tokenizer
from tiny import tiny as tiny_model

from benchmarks import __main__ as command
from benchmarks import measure, models, others, ours, plan, report
from benchmarks.measure import Case
from igcore.policy import Policy
from igstudy.provenance import processor

LETTERS = "abcdefghijklmnopqrstuvwxyz"
P, N, T, S = 6, 4, 6, 2  # prompt tokens, samples, new tokens, block size
CASE = Case("inferenceguard", prompts=2, prompt_tokens=P, n_samples=N, new_tokens=T, block=S)
# the prompt once, then every token once, but the last of an answer, which nothing follows
SAMPLED = P + N * (T - 1)
READ = {  # tokens that the policy reads for one prompt
    "transformers generate": N * (P + T - 1),
    "its_hub best-of-n": N * (P + T - 1),
    # each step encodes all again
    "its_hub beam search": sum(N * (P + k * S + S - 1) for k in range(T // S)),
    "inferenceguard": SAMPLED,
    "backtracking": P + T - 1,
}


@pytest.fixture(scope="module")
def tiny():
    model = tiny_model("llama", vocab_size=len(LETTERS))
    model.generation_config = models.SAMPLING
    made = models.Models(Policy("letters", model, tiny_tokenizer(LETTERS)), LETTERS * 20)
    for variant in ours.VARIANTS.values():  # caches are tried once, and not counted
        variant(made, CASE, made.prompts(2, P), 1)
    return made


def counted(tiny, name, case):
    """Return the answers of a variant, and how many tokens the policy has read."""
    with Counter(tiny.policy.model) as counter:
        answers = plan.VARIANTS[name](tiny, case, tiny.prompts(case.prompts, P), 1)
    return answers, counter.tokens


@pytest.mark.parametrize("name", plan.VARIANTS)
def test_every_variant_answers_every_prompt_in_full_with_the_tokens_counted_by_hand(
    tiny, name, monkeypatch
):
    """Guards the comparison: a variant that samples less, ends early or reads less than it says
    would look fast. Near ties, which are read again, are left out.
    """
    if name in others.HUB:
        pytest.importorskip("its_hub")
    monkeypatch.setattr("igcore.engine.sampling.NEAR_TIE", 0.0)
    answers, tokens = counted(tiny, name, CASE)
    assert [len(answer) for answer in answers] == [T, T]
    assert tokens == 2 * READ[name]


@pytest.mark.parametrize("cost", models.COSTS)
@pytest.mark.parametrize("method", ["inferenceguard", "backtracking"])
def test_every_cost_is_asked_and_finds_every_text_within_budget(tiny, method, cost, monkeypatch):
    """Guards rows of a cost that no guard reads, and those of a search that tried again."""
    asked = []
    harmless = tiny.cost("free")
    made = models.COSTS | {"smollm2-harm-2": lambda: harmless}
    monkeypatch.setattr(models, "COSTS", made)
    scorer = tiny.cost(cost)
    score = type(scorer).score
    monkeypatch.setattr(
        type(scorer), "score", lambda self, *texts: asked.append(texts) or score(self, *texts)
    )
    monkeypatch.setattr("igcore.engine.sampling.NEAR_TIE", 0.0)
    answers, tokens = counted(tiny, method, replace(CASE, cost=cost))
    assert [len(answer) for answer in answers] == [T, T] and asked
    assert tokens == 2 * READ[method]


def lines_of(case, *seconds):
    return [measure.line(case, repeat, each) for repeat, each in enumerate(seconds)]


def test_the_table_holds_least_median_and_most_per_prompt():
    """Guards every figure shown: of the repeats, per prompt."""
    other = replace(CASE, variant="backtracking")
    lines = lines_of(CASE, 2.0, 18.0, 4.0) + lines_of(other, 5.0)
    table = measure.table(lines, [CASE, other, CASE])
    assert table["variant"].tolist() == ["inferenceguard", "backtracking"]
    row = table.iloc[0]
    assert [row[f"cpu_s_{name}"] for name in measure.SPREAD] == [1.0, 2.0, 9.0]
    assert (row["tokens_per_s"], row["repeats"]) == (N * T / 2.0, 3)
    assert table["repeats"].tolist() == [3, 1]


def test_a_ratio_is_that_of_two_neighbours(tmp_path):
    """Bug: the ratio of two medians, which no two measurements had."""
    peer, long = replace(CASE, variant=plan.GENERATE), replace(CASE, new_tokens=9)
    slow, dear = replace(peer, new_tokens=9), replace(CASE, cost="smollm2-harm-2")
    lines = lines_of(peer, 6.0, 8.0, 1.0) + lines_of(CASE, 2.0, 4.0, 2.0)
    lines += lines_of(slow, 4.0, 6.0, 5.0) + lines_of(long, 2.0, 2.0, 2.0)
    lines += lines_of(dear, 8.0)
    pairs = [(peer, CASE), (slow, long), (dear, CASE)]
    found = measure.ratios(lines, pairs)
    assert found.iloc[0].tolist()[2:] == [CASE.size, 0.5, 2.0, 3.0]
    words = report.in_words(found).splitlines()
    assert words == [
        "* transformers generate / inferenceguard: 2.00 to 2.50",
        "* inferenceguard, smollm2-harm-2 at every word / inferenceguard: 4.00 to 4.00",
    ]
    cases = [case for pair in pairs for case in pair]
    paths = report.write(lines, cases, pairs, ["a note"], tmp_path)
    names = [path.name for path in paths]
    assert names == ["bench.csv", "bench_ratios.csv", "bench_words.md"]
    assert (tmp_path / "tables/bench_words.md").read_text() == "\n".join([*words, "* a note", ""])


@pytest.mark.parametrize("version", [None, "1.2.0"])
def test_every_planned_case_can_be_run(monkeypatch, version):
    """Guards a long run against a case that is refused at its end, a ratio that names a case
    nobody measures, and rows of a package that is not there.
    """
    monkeypatch.setattr(others, "installed", lambda: version)
    cases = [case for cases in plan.sections() for case in cases]
    assert len(set(cases)) == len(cases)
    wanted = plan.VARIANTS if version else plan.VARIANTS.keys() - others.HUB.keys()
    assert {case.variant for case in cases} == {*wanted}
    for case in [*cases, *map(plan.warm_up, cases)]:
        assert case.cost in models.COSTS and case.new_tokens % case.block == 0
        assert case.n_samples % case.keep == 0
    for first, second in plan.pairs():
        (section,) = [section for section in plan.sections() if first in section]
        assert second in section and first.size == second.size


def test_prompts_have_the_wanted_length_and_differ(tiny):
    """Guards the prompt_tokens column: text cut between tokens may be read back as others."""
    prompts = tiny.prompts(3, 8)
    assert [len(tiny.policy.encode(prompt)) for prompt in prompts] == [8, 8, 8]
    assert len(set(prompts)) == 3
    merging = SimpleNamespace(  # reads "ab" as one token
        tokenizer=lambda text: {"input_ids": list(text)},
        text="".join,
        encode=lambda text: text.replace("ab", "x"),
    )
    assert models.cut(merging, "aaacab   bbaccc", 2, 3) == ["aaa", "bba"]


def test_the_script_writes_tables(tiny, tmp_path, monkeypatch, capsys):
    """Guards the script as a whole: each case is measured in each repeat, in turn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "smollm2", lambda: tiny)
    monkeypatch.setattr(others, "installed", lambda: None)
    small = {"prompt_tokens": P, "n_samples": N, "new_tokens": T, "block": S}
    names = plan.GENERATE, plan.GUARD, plan.BACK
    cases = [Case(name, **small) for name in names]
    monkeypatch.setattr(plan, "sections", lambda: [cases])
    assert command.main() == 0
    folder = tmp_path / "runs" / "bench"
    assert pd.read_csv(folder / "figures/tables/bench.csv")["variant"].tolist() == [*names]
    words = (folder / "figures/tables/bench_words.md").read_text()
    assert f"* measured on {processor()}, one thread\n" in words
    assert "without its_hub, which is not installed" in words
    said = [line for line in capsys.readouterr().out.splitlines() if "CPU s" in line]
    assert [line.split(":")[0] for line in said] == [*names] * 2
    assert [", repeat 2:" in line for line in said] == [False] * 3 + [True] * 3
