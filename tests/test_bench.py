"""Tests of the benchmark on tiny random Llamas whose tokens are characters: what is counted,
remembered and compared.
"""

import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig

from benchmarks import __main__ as command
from benchmarks import baselines, measure, models, ours, plan, report
from benchmarks.measure import Case, Meter
from igcore.engine.agreement import cache_for, supports_shared_prefix
from igcore.engine.memory import kv_bytes
from igstudy.provenance import processor
from igstudy.runs.folders import open_run

P, N, T, S = 6, 4, 6, 2  # prompt tokens, samples, new tokens, block size
CASE = Case(
    "test",
    "A1",
    "random tiny",
    prompts=2,
    prompt_tokens=P,
    n_samples=N,
    new_tokens=T,
    keep=2,
    block=S,
)
# generate leaves its last token unread
NAIVE = sum(N * (P + k * S + S - 1) + 2 * N * (P + (k + 1) * S) for k in range(T // S))
# the prompt once, then every token once, but the last of an answer, which nothing follows
SAMPLED = P + N * (T - 1)
# both scorers read every token once, and the prompt together, because they share a model; the
# verdict reads the text twice, and once more to its last end before; the reward reads the text
# again for the report
SEARCHED = SAMPLED + P + 2 * N * T + 2 * (P + T) + (P + T - S) + (P + T)
TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
FORWARD_TOKENS = {
    "A1": NAIVE,
    "A2": NAIVE,
    "A3": NAIVE,
    "B": SEARCHED,
    "C": SEARCHED,
    "guarded, free": SAMPLED,
    "guarded, rude": SAMPLED,
    "guarded, harm": SAMPLED,  # the models of scorers by name are not metered
    "unguarded, free": SAMPLED,
    "one block, free": SAMPLED,
    "sample dynamic": SAMPLED,
    "sample shared": SAMPLED,
    "engine": SAMPLED,
    "generate": N * (P + T - 1),
}


@pytest.fixture(scope="module")
def tiny():
    made = models.random_llama(TINY, "float32")
    for model in made.all:  # now, because each test reads a few tokens, once
        assert supports_shared_prefix(model) and supports_shared_prefix(model.base_model)
    cache_for(made.policy.model, "dynamic")
    return made


@pytest.mark.parametrize("name", plan.VARIANTS)
def test_every_variant_answers_every_prompt_in_full_with_the_tokens_counted_by_hand(
    tiny, name, monkeypatch
):
    """Guards the comparison: a variant that samples less, ends early or reads less than it says
    would look fast. Near ties, which are read again, are left out.
    """
    monkeypatch.setattr("igcore.engine.sampling.NEAR_TIE", 0.0)
    roles = {"minilm-relevance": "reward"}
    monkeypatch.setattr(ours, "loaded", lambda name: models.free(roles.get(name, "cost")))
    prompts = tiny.prompts(2, P)
    plan.VARIANTS[name](tiny, CASE, prompts, seed=1)  # caches are tried once, and not counted
    with Meter(tiny.all) as meter:
        answers = plan.VARIANTS[name](tiny, CASE, prompts, seed=1)
    assert [len(answer) for answer in answers] == [T, T]
    assert (meter.tokens, meter.padding) == (2 * FORWARD_TOKENS[name], 0)


@pytest.mark.parametrize("rows", [(1, 1), (None, 1), (None, None)])
def test_the_naive_search_keeps_the_highest_reward(tiny, rows, monkeypatch):
    """Guards the baseline against a search that is not the one it is compared with."""
    blocks = torch.randint(97, (N, T), generator=torch.Generator().manual_seed(3)).tolist()
    left = iter(blocks)
    monkeypatch.setattr(
        baselines, "generate", lambda _, rows, length: [row + next(left) for row in rows]
    )
    prompt = tiny.prompts(1, P)
    naive = baselines.one_by_one(baselines.naive, generate_rows=rows[0], score_rows=rows[1])
    (answer,) = naive(tiny, replace(CASE, block=T), prompt, 0)
    scores = tiny.lm_scorer("reward").score(
        prompt * N, [tiny.policy.text(block) for block in blocks], [True] * N
    )
    assert answer == tiny.policy.text(blocks[scores.argmax()])


def test_generate_answers_uneven_prompts_in_one_padded_batch(tiny, monkeypatch):
    """Guards fairness: one prompt after another would cost a peer the gain of a batch; and a batch
    that does not fit into memory would cost it the row.
    """
    case = replace(CASE, prompts=3, prompt_tokens=7, shortest=3)
    assert case.lengths == [7, 5, 3]
    prompts = [tiny.prompts(1, length)[0] for length in case.lengths]
    for most, padding in ((3, 2 + 4), (2, 2)):
        monkeypatch.setattr(baselines, "batch_size", lambda each, free, gb, most=most: most)
        with Meter(tiny.all) as meter:
            answers = plan.VARIANTS["generate"](tiny, case, prompts, 0)
        assert [len(answer) for answer in answers] == [T, T, T]
        assert (meter.tokens, meter.padding) == (N * (7 + 5 + 3 + 3 * (T - 1)), N * padding)


@pytest.mark.parametrize("name", ["engine", "generate"])
def test_bytes_of_keys_and_values_are_those_of_the_formula(tiny, name):
    """Guards the memory column: a cache that lives on unseen, or one that is counted twice."""
    with Meter(tiny.all) as meter:
        plan.VARIANTS[name](tiny, replace(CASE, prompts=1), tiny.prompts(1, P), 0)
    sizes = {"engine": (1, P, N, T), "generate": (0, 0, N, P + T - 1)}
    assert meter.kv_bytes == kv_bytes(tiny.policy.model, *sizes[name])


def fake(monkeypatch, work):
    """Put one variant in the place of all, which answers by `work(case)`."""

    def variant(_models, case, prompts, _seed):
        return work(case) or [""] * len(prompts)

    monkeypatch.setattr(plan, "VARIANTS", {"fake": variant})
    return [replace(CASE, variant=name, run="fake") for name in ("one", "two")]


@contextmanager
def opened(folder):
    """Open a run folder of the benchmark; a test that ends early leaves it as a kill does."""
    with open_run(folder, {"code": "one"}) as run:
        yield run


def test_a_killed_benchmark_goes_on_where_it_was(tiny, monkeypatch, tmp_path):
    """Guards hours of measuring: finished work is not repeated, and a half-written line is measured
    again.
    """
    done = []

    def work(case):
        if case.prompts == 1:
            return  # the warm-up
        done.append(case.variant)
        if len(done) == 3:
            raise KeyboardInterrupt

    sections = {"section": fake(monkeypatch, work)}
    with pytest.raises(KeyboardInterrupt), opened(tmp_path / "bench") as run:
        command.bench(sections, run, 2, lambda *_: tiny)
    assert done == ["one", "two", "one"]  # round-robin
    with run.responses.open("a") as file:
        file.write('{"method": "Case(')
    with opened(tmp_path / "bench") as run:
        command.bench(sections, run, 2, lambda *_: tiny)
    assert done[3:] == ["one", "two"]
    assert len(run.lines) == len(run.responses.read_text().splitlines()) == 4
    with opened(tmp_path / "bench") as run:
        command.bench(sections, run, 2, lambda *_: tiny)
    assert len(done) == 5


def test_the_models_of_a_section_are_freed_before_the_next(tiny, monkeypatch, tmp_path):
    """Guards the memory of a machine against the models of all sections at once."""
    alive, cases = [], fake(monkeypatch, lambda case: None)

    def load(*_):
        assert not any(made() for made in alive)
        alive.append(weakref.ref(made := replace(tiny)))
        return made

    with opened(tmp_path / "bench") as run:
        command.bench({"a": cases[:1], "b": cases[1:]}, run, 2, load)
    assert len(alive) == 2


def line(case: Case, seconds: float, repeat: int = 0, **more) -> dict:
    found = {"cpu_s": seconds, "wall_s": 2 * seconds}
    found |= {"padding": 0, "kv_bytes": 7, "forward_tokens": 9}
    return measure.line(case, repeat, found | more)


def test_the_table_holds_medians_per_prompt():
    """Guards every figure shown: the median of the repeats, per prompt for seconds, per run for
    tokens and bytes.
    """
    b = replace(CASE, run="B")
    lines = [
        line(b, 5.0),
        *(line(CASE, seconds, repeat) for repeat, seconds in enumerate((1.0, 9.0, 2.0))),
    ]
    table = measure.table(lines, {"section": [CASE, b, CASE]})
    assert list(table.columns) == measure.COLUMNS
    assert list(table.index) == [repr(CASE), repr(b)]
    row = table.iloc[0]
    assert (row["cpu_s_per_prompt"], row["wall_s_per_prompt"], row["repeats"]) == (1.0, 2.0, 3)
    assert row["tokens_per_s"] == 2 * N * T / 4.0
    assert (row["kv_bytes"], row["forward_tokens"]) == (7, 9)


def rows_compared(lines, cases, ratios, out):
    """Return the cells of ``bench_ratios.md``, row by row."""
    table = measure.table(lines, {"section": cases})
    report.write(table, ratios, "a chip", ["a note"], out)
    ending = "\n\n* measured on a chip\n* a note\n"
    assert (out / "tables" / "bench.md").read_text().endswith(ending)
    text = (out / "tables" / "bench_ratios.md").read_text()
    assert text.endswith(ending)
    rows = text.removesuffix(ending).splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_comparisons_have_the_right_case_on_the_right_side(tmp_path):
    """Guards the results page: seconds and bytes of each case, and no row for one that was not
    planned.
    """
    a, b = replace(CASE, run="B"), replace(CASE, variant="other")
    lines = [line(a, 6.0, kv_bytes=20), line(b, 2.0, kv_bytes=5)]
    unplanned = replace(a, prompts=3)
    ratios = [
        ("a / b", a, b),
        ("b / a", b, a),
        ("a / unplanned", a, unplanned),
    ]
    assert rows_compared(lines, [a, b], ratios, tmp_path) == [
        ["a / b", "3.00", "1.00", "3.00", "4.00"],
        ["b / a", "1.00", "3.00", "0.33", ""],  # a naive baseline frees its cache after each call
    ]


def test_every_planned_case_can_be_run():
    """Guards a long run against a case that is refused at its end, and a ratio that names a case
    nobody measures.
    """
    cases = [case for cases in plan.sections().values() for case in cases]
    for case in [*cases, *map(plan.warm_up, cases)]:
        assert case.run in plan.VARIANTS and case.models in models.MODELS
        assert 1 <= case.keep <= case.n_samples and 1 <= case.block
        assert case.block <= case.new_tokens or case.run == "engine"
        assert len(case.lengths) == case.prompts and min(case.lengths) >= 1
    for _, *pair in plan.ratios():
        assert all(case in cases for case in pair)


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


def tiny_case(case: Case) -> Case:
    """Return a case of the same shape on a tiny random model."""
    return replace(
        case,
        models="random tiny",
        prompts=min(case.prompts, 2),
        prompt_tokens=max(case.prompt_tokens // 8, 2),
        shortest=min(case.shortest, 2),
        n_samples=case.n_samples // 4,
        keep=1 if case.n_samples < 8 else 2,
        new_tokens=case.new_tokens // 8,
        block=max(case.block // 8, 1),
    )


def test_the_script_writes_table_and_notes_and_resumes(tmp_path, monkeypatch, capsys):
    """Guards the script as a whole, and that a second start measures nothing."""
    monkeypatch.chdir(tmp_path)
    sections, ratios = plan.sections(), plan.ratios()
    sections = {name: list(map(tiny_case, cases)) for name, cases in sections.items()}
    ratios = [(text, tiny_case(a), tiny_case(b)) for text, a, b in ratios]
    monkeypatch.setattr(plan, "sections", lambda: sections)
    monkeypatch.setattr(plan, "ratios", lambda: ratios)
    made = {"random tiny": lambda dtype: models.random_llama(TINY, dtype)}
    monkeypatch.setattr(command, "MODELS", made)
    chosen = r"guarded search: [AC].*float32|other sizes: .*(5 to 200|128,256)"
    arguments = ["--repeats", "1", "--only", chosen]
    assert command.main(arguments) == 0
    first = capsys.readouterr().out
    folder = tmp_path / "runs" / "bench"
    table = pd.read_csv(folder / "tables" / "bench.csv")
    assert list(table.columns) == measure.COLUMNS
    assert len(table) == 9
    assert f"* measured on {processor()}\n" in (folder / "tables" / "bench_ratios.md").read_text()
    assert "| A1 / C, float32" in (folder / "tables" / "bench_ratios.md").read_text()
    assert command.main(arguments) == 0
    assert "repeat 1" in first and "repeat 1" not in capsys.readouterr().out
    assert len((folder / "responses.jsonl").read_text().splitlines()) == 9


def test_a_measurement_is_known_by_the_code_that_was_measured():
    """Bug: a baseline changed and its old numbers stood, or an hour was lost to a new picture; and
    ratios of two processors stood in one table.
    """
    identity = command._identity()
    assert identity["processor"] == processor() and identity["versions"]["transformers"]
    known = identity["code"].keys()
    measured = {f"benchmarks.{name}" for name in ("measure", "models", "ours", "plan", "baselines")}
    assert measured | {"igcore"} <= known
    assert not {"benchmarks.report", "benchmarks.__main__"} & known


def test_a_part_of_the_benchmark_does_not_replace_the_whole(tiny, tmp_path, monkeypatch):
    """Bug: a look at one case left one row in the table of an hour's measuring."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "MODELS", {"random tiny": lambda dtype: tiny})
    cases = fake(monkeypatch, lambda case: None)
    monkeypatch.setattr(plan, "sections", lambda: {"section": cases})
    assert command.main(["--repeats", "1"]) == 0
    tables = tmp_path / "runs" / "bench" / "figures" / "tables"
    whole = (tables / "bench.csv").read_text()
    assert pd.read_csv(tables / "bench.csv")["variant"].tolist() == ["one", "two"]
    assert command.main(["--repeats", "2", "--only", "two"]) == 0
    assert (tables / "bench.csv").read_text() == whole
    part = pd.read_csv(tmp_path / "runs" / "bench" / "tables" / "bench.csv")
    assert part["repeats"].tolist() == [2]
