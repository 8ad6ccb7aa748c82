"""Tests of the benchmark on tiny random Llamas whose tokens are characters: what is counted,
remembered and compared.
"""

import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from benchmarks import __main__ as command
from benchmarks import measure, models, plan, report, rivals
from benchmarks.measure import Case, Log, Meter
from igcore.engine.memory import kv_bytes
from igcore.engine.prefix_cache import fits
from igcore.errors import PolicyError

HAS_ITS_HUB = importlib.util.find_spec("its_hub") is not None
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
NAIVE = sum(
    N * (P + k * S + S - 1) + 2 * N * (P + (k + 1) * S) for k in range(T // S)
)  # generate leaves its last token unread
SAMPLED = P + N * (
    T - 1
)  # the prompt once, then every token once, but the last of an answer, which nothing follows
# both scorers read every token once; what is reported is read again: the text by both, and by the
# cost to its last end before
SEARCHED = SAMPLED + 2 * (P + N * T) + 2 * (P + T) + P + T - S
FORWARD_TOKENS = {
    "A1": NAIVE,
    "A2": NAIVE,
    "A3": NAIVE,
    "B": SEARCHED,
    "C": SEARCHED,
    "guarded, free": SAMPLED,
    "unguarded, free": SAMPLED,
    "one block, free": SAMPLED,
    "sample dynamic": SAMPLED,
    "sample shared": SAMPLED,
    "engine": SAMPLED,
    "draw": 0,
    # both prompts once, then one token for the policy and N for the reward at each position; the
    # text once more
    "args": 2 * P + T - 1 + N * T + P + T,
    "args, scored anew": P + T - 1 + sum(N * (P + k + 1) for k in range(T)),
    "args, all anew": sum(P + k + N * (P + k + 1) for k in range(T)),
    "generate": N * (P + T - 1),
    "its_hub best-of-n": N * (P + T - 1),
    "its_hub beam": sum(
        (N // 2 if k == 0 else N) * (P + k * S + S - 1) for k in range(T // S)
    ),  # first N / width samples only
}


@pytest.fixture(scope="module")
def tiny():
    made = models.MODELS["random tiny"]("float32")
    assert all(
        fits(model) and fits(model.base_model) for model in made.all
    )  # asked now: the answer takes a few tokens, once
    return made


@pytest.mark.parametrize("name", plan.VARIANTS)
def test_every_variant_answers_every_prompt_in_full_with_the_tokens_counted_by_hand(tiny, name):
    """Guards the comparison: a variant that samples less, ends early or reads less than it says
    would look fast.
    """
    if name.startswith("its_hub") and not HAS_ITS_HUB:
        pytest.skip("its_hub is not installed")
    prompts = tiny.prompts(2, P)
    with Meter(tiny.all) as meter:
        answers = plan.VARIANTS[name](tiny, CASE, prompts, seed=1)
    assert [len(answer) for answer in answers] == [T, T]
    assert (meter.tokens, meter.padding) == (2 * FORWARD_TOKENS[name], 0)


def test_all_three_args_answer_alike(tiny):
    """Guards the comparison: nothing is drawn, so that rivals which score the same texts find the
    same tokens.
    """
    prompts, case = tiny.prompts(3, P), replace(CASE, new_tokens=9)
    found = [
        plan.VARIANTS[name](tiny, case, prompts, seed=1)
        for name in ("args", "args, scored anew", "args, all anew")
    ]
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3
    assert found[0] != plan.VARIANTS["args"](
        tiny, replace(case, n_samples=1, keep=1), prompts, seed=1
    )  # the reward decides


@pytest.mark.parametrize("rows", [(1, 1), (None, 1), (None, None)])
def test_the_naive_search_keeps_the_highest_reward(tiny, rows, monkeypatch):
    """Guards the rival against a search that is not the one it is compared with."""
    blocks = torch.randint(97, (N, T), generator=torch.Generator().manual_seed(3)).tolist()
    left = iter(blocks)
    monkeypatch.setattr(
        rivals, "generate", lambda _, rows, length: [row + next(left) for row in rows]
    )
    prompt = tiny.prompts(1, P)
    (answer,) = rivals.naive(*rows)(tiny, replace(CASE, block=T), prompt, 0)
    scores = tiny.lm_scorers()["reward"].score(
        prompt * N, [tiny.policy.text(block) for block in blocks], [True] * N
    )
    assert answer == tiny.policy.text(blocks[scores.argmax()])


@pytest.mark.skipif(not HAS_ITS_HUB, reason="its_hub is not installed")
@pytest.mark.parametrize(
    ("name", "batches"), [("its_hub best-of-n", [N]), ("its_hub beam", [N // 2, N, N])]
)
def test_its_hub_is_answered_in_batches(tiny, monkeypatch, name, batches):
    """Guards fairness: requests answered one at a time would cost it five times as much."""
    sizes, generate = [], rivals.generate
    monkeypatch.setattr(
        rivals,
        "generate",
        lambda models, rows, length: sizes.append(len(rows)) or generate(models, rows, length),
    )
    plan.VARIANTS[name](tiny, CASE, tiny.prompts(1, P), 0)
    assert sizes == batches


def test_the_meter_counts_useful_operations_as_torch_does():
    """Guards the share of the peak: one token after a prompt, linear layers, head and attention."""
    model = models.MODELS["random tiny"]("float32").policy.model
    model.set_attn_implementation(
        "eager"
    )  # torch counts no operation inside the attention it has for CPUs
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3, 4, 5]]), past_key_values=cache)
        with Meter([model]) as meter, FlopCounterMode(display=False) as counter:
            model(torch.tensor([[6]]), past_key_values=cache)
    assert meter.flops == counter.get_total_flops()
    assert meter.tokens == 1


def test_padding_is_counted_apart(tiny):
    """Guards forward_tokens: encoding nothing is waste, but no token."""
    with Meter(tiny.all) as meter:
        rivals.generate(tiny, [[1, 2, 3], [4]], 2)
    assert (meter.tokens, meter.padding) == (3 + 1 + 2, 2)


@pytest.mark.parametrize("name", ["engine", "generate"])
def test_bytes_of_keys_and_values_are_those_of_the_formula(tiny, name):
    """Guards the memory column: a cache that lives on unseen, or one that is counted twice."""
    with Meter(tiny.all) as meter:
        plan.VARIANTS[name](tiny, replace(CASE, prompts=1), tiny.prompts(1, P), 0)
    sizes = {"engine": (1, P, N, T), "generate": (0, 0, N, P + T - 1)}
    assert meter.kv_bytes == kv_bytes(tiny.policy.model, *sizes[name])


def test_the_meter_leaves_no_hook_behind(tiny):
    with Meter(tiny.all):
        pass
    assert not any(
        m._forward_pre_hooks or m._forward_hooks for model in tiny.all for m in model.modules()
    )


def fake(monkeypatch, work):
    """Put one variant in the place of all, which answers by `work(case)`."""
    monkeypatch.setattr(
        plan,
        "VARIANTS",
        {"fake": lambda _models, case, prompts, _seed: work(case) or [""] * len(prompts)},
    )
    return [replace(CASE, variant=name, run="fake") for name in ("one", "two")]


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

    cases = fake(monkeypatch, work)
    with pytest.raises(KeyboardInterrupt):
        command.bench({"section": cases}, Log(tmp_path / "raw.jsonl"), "", 2, lambda *_: tiny)
    assert done == ["one", "two", "one"]  # round-robin
    with (tmp_path / "raw.jsonl").open("a") as file:
        file.write('{"case": {"variant"')
    command.bench({"section": cases}, log := Log(tmp_path / "raw.jsonl"), "", 2, lambda *_: tiny)
    assert done[3:] == ["one", "two"]
    assert len(log.lines) == len((tmp_path / "raw.jsonl").read_text().splitlines()) == 4
    command.bench({"section": cases}, Log(tmp_path / "raw.jsonl"), "", 2, lambda *_: tiny)
    assert len(done) == 5


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("too much"), PolicyError("too little memory for one prompt")]
)
def test_a_case_too_large_for_the_device_is_named_and_the_others_go_on(
    tiny, monkeypatch, tmp_path, error
):
    """Guards a night on a GPU against one setting that does not fit."""

    def work(case):
        if case.variant == "one":
            raise error

    cases = fake(monkeypatch, work)
    log = Log(tmp_path / "raw.jsonl")
    (sentence,) = command.bench({"section": cases}, log, "", 2, lambda *_: tiny)
    assert sentence.startswith("one") and "too little memory" in sentence
    assert [line["case"]["variant"] for line in log.lines] == ["two", "two"]


def test_only_picks_cases_by_section_and_name(tiny, monkeypatch, tmp_path):
    cases = fake(monkeypatch, lambda case: None)
    log = Log(tmp_path / "raw.jsonl")
    command.bench(
        {"a": cases, "b": [replace(case, block=1) for case in cases]},
        log,
        "^b: two",
        1,
        lambda *_: tiny,
    )
    assert [(line["case"]["variant"], line["case"]["block"]) for line in log.lines] == [("two", 1)]


def line(case: Case, seconds: float, **more) -> dict:
    found = {
        "cpu_s": seconds,
        "wall_s": 2 * seconds,
        "busy_s": seconds,
        "rate": 50.0,
        "device": "cpu",
        "flops": 100,
        "padding": 0,
    }
    return (
        {"case": vars(case), "repeat": 0, "at": "2030-01-01 00:00 UTC"}
        | found
        | {"kv_bytes": 7, "forward_tokens": 9}
        | more
    )


def test_the_table_holds_medians_per_prompt():
    """Guards every figure shown: the median of the repeats, per prompt for seconds, per run for
    tokens and bytes.
    """
    lines = [
        line(replace(CASE, run="B"), 5.0, rate=100.0),
        *(line(CASE, seconds) for seconds in (1.0, 9.0, 2.0)),
    ]
    table = measure.table(lines, [CASE, replace(CASE, run="B"), replace(CASE, run="C")])
    assert list(table.columns[: len(measure.COLUMNS)]) == measure.COLUMNS
    assert len(table) == 2
    row = table.iloc[0]
    assert (row["cpu_s_per_prompt"], row["wall_s_per_prompt"], row["repeats"]) == (1.0, 2.0, 3)
    assert row["tokens_per_s"] == 2 * N * T / 4.0
    assert row["gemm_share"] == 100 / 2.0 / 100.0  # by the best rate of all lines
    assert (row["kv_bytes"], row["forward_tokens"]) == (7, 9)


def test_ratios_are_found_and_padding_is_stated():
    a, b = CASE, replace(CASE, variant="other")
    table = measure.table([line(a, 6.0, padding=3), line(b, 2.0)], [a, b])
    notes = report.notes(
        table, [("a / b", a, b), ("a / missing", a, replace(a, prompts=3))], ["skipped: x"]
    )
    assert notes[0] == "a / b: 3.00"
    assert not any("missing" in note for note in notes)
    assert any("test 33.3%" in note for note in notes) and notes[-1] == "skipped: x"


def test_the_summary_says_what_was_compared_and_what_was_not_measured():
    """Guards the README: seconds and bytes of the right case on the right side, and no figure for a
    GPU that was not there.
    """
    a, b = replace(CASE, run="B"), replace(CASE, variant="other")
    table = measure.table([line(a, 6.0, kv_bytes=20), line(b, 2.0, kv_bytes=5)], [a, b])
    text = report.summary(table, [("a / b", a, b), ("b / a", b, a)])
    assert "| a / b | 3.00 | 1.00 | 3.00 | 4.00 |" in text
    assert (
        "| b / a | 1.00 | 3.00 | 0.33 |  |" in text
    )  # a naive rival frees everything after each call
    assert "| 2.02 | not measured |" in text
    seven = replace(CASE, variant="C, random 7B")
    text = report.summary(measure.table([line(seven, 6.0)], [seven]), [])
    assert "not measured" not in text and "| paper / C, random 7B" in text


@pytest.mark.parametrize("quick", [False, True])
def test_every_planned_case_can_be_run(quick):
    """Guards a long run against a case that is refused at its end, and a ratio that names a case
    nobody measures.
    """
    cases = [case for cases in plan.sections(quick).values() for case in cases]
    for case in [*cases, *map(plan.warm_up, cases)]:
        assert case.run in plan.VARIANTS and case.models in models.MODELS
        assert 1 <= case.keep <= case.n_samples and 1 <= case.block
        assert case.block <= case.new_tokens or case.run in ("engine", "draw")
    for _, *pair in plan.ratios(quick):
        assert all(case in cases for case in pair if HAS_ITS_HUB or "its_hub" not in case.run)


def test_prompts_have_the_wanted_length_and_differ(tiny):
    """Guards the prompt_tokens column: text cut between tokens may be read back as others."""
    prompts = tiny.prompts(3, 8)
    assert [len(tiny.policy.encode(prompt)) for prompt in prompts] == [8, 8, 8] and len(
        set(prompts)
    ) == 3
    merging = SimpleNamespace(  # reads "ab" as one token
        tokenizer=lambda text: {"input_ids": list(text)},
        text="".join,
        encode=lambda text: text.replace("ab", "x"),
    )
    assert models.cut(merging, "aaacab   bbaccc", 2, 3) == ["aaa", "bba"]


def test_quick_writes_table_notes_and_picture_and_resumes(tmp_path, monkeypatch, capsys):
    """Guards the script as a whole, with the 7B part at a tiny size, and that a second start
    measures nothing.
    """
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--quick",
        "--repeats",
        "1",
        "--only",
        r"guarded search: [AC].*float32|7B: .* 8 samples",
    ]
    assert command.main(arguments) == 0
    first = capsys.readouterr().out
    folder = tmp_path / "runs" / "bench-quick"
    table = pd.read_csv(folder / "tables" / "bench.csv")
    assert list(table.columns) == [*measure.COLUMNS, "padding", "repeats", "measured"]
    assert sum(table["variant"].str.endswith("random 7B")) == 4 and len(table) == 9
    assert {path.name for path in folder.glob("bench.*")} == {"bench.png", "bench.pdf"}
    assert (
        "A1 / C, float32:" in first and "prompts/s" in (folder / "tables" / "bench.md").read_text()
    )
    assert command.main(arguments) == 0
    assert "repeat 1" in first and "repeat 1" not in capsys.readouterr().out
    assert len((folder / "raw.jsonl").read_text().splitlines()) == 9


def test_a_measurement_is_known_by_the_code_that_was_measured():
    """Bug: a rival was changed and its old numbers stood, or an hour was lost to a new picture."""
    known = command._identity()["code"].keys()
    measured = {f"benchmarks.{name}" for name in ("measure", "models", "ours", "plan", "rivals")}
    assert measured | {"igcore.search", "igcore.models.lm_scorer"} <= known
    assert not {"benchmarks.report", "benchmarks.__main__"} & known


def test_only_keeps_the_rows_that_it_does_not_measure(tiny, tmp_path, monkeypatch):
    """Guards an hour of measuring: after a change of the code the log is empty, and a look at one
    case once left one row.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "MODELS", {"random tiny": lambda dtype: tiny})
    monkeypatch.setattr(plan, "ratios", lambda quick: [("one / two", *cases)])
    cases = fake(monkeypatch, lambda case: None)
    cases[0] = replace(cases[0], variant=plan.C.variant)
    monkeypatch.setattr(plan, "sections", lambda quick: {"a": cases})
    code = iter(["first", "second", "third"])
    monkeypatch.setattr(
        command, "_identity", lambda: {"versions": {"torch": "2"}, "code": next(code)}
    )
    tables = tmp_path / "figures" / "tables"

    def rows():
        return (tables / "bench.csv").read_text().splitlines()

    assert command.main(["--repeats", "1"]) == 0
    whole = rows()
    assert len(whole) == 3 and "| measurement |" not in (tables / "bench.md").read_text()

    assert command.main(["--repeats", "1", "--only", "two"]) == 0
    assert rows()[:2] == whole[:2] and rows()[2] != whole[2] and len(rows()) == 3
    first, second = pd.read_csv(tables / "bench.csv")["measured"]
    text = (tables / "bench.md").read_text()
    assert (
        first != second
        and f"* measurement 1: {first}" in text
        and f"* measurement 2: {second}" in text
    )
    assert (
        "| measurement |" in text
        and "| one / two, of two measurements |" in (tables / "bench_ratios.md").read_text()
    )

    assert command.main(["--repeats", "1"]) == 0  # all of it again: nothing is left of the others
    assert pd.read_csv(tables / "bench.csv")["measured"].nunique() == 1


def test_a_table_without_times_is_kept_and_says_so(tmp_path):
    """Guards rows that were written before a table said when; what is new comes last."""
    a, b, new = CASE, replace(CASE, variant="other"), replace(CASE, variant="new")
    report.write(measure.table([line(a, 6.0), line(b, 2.0)], [a, b]), [], "", tmp_path)
    path = tmp_path / "tables" / "bench.csv"
    pd.read_csv(path)[measure.COLUMNS].to_csv(path, index=False)
    table = report.with_earlier(measure.table([line(new, 1.0), line(b, 4.0)], [new, b]), tmp_path)
    assert table["variant"].tolist() == ["test", "other", "new"]
    assert table["cpu_s_per_prompt"].tolist() == [3.0, 2.0, 0.5]
    notes = report.notes(table, [], [])
    assert "measurement 1: at a time that is not recorded" in notes
    assert "repeats, of which the medians are shown: 1 to 1" in notes


@pytest.mark.parametrize(
    "arguments", [["--only", "nothing like this"], ["--repeats", "0"], ["--only", "("]]
)
def test_bad_options_end_in_one_sentence(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert command.main(["--quick", *arguments]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_line_of_the_log_is_json_that_holds_its_case(tiny, tmp_path, monkeypatch):
    (case, _) = fake(monkeypatch, lambda case: None)
    command.bench({"section": [case]}, Log(tmp_path / "raw.jsonl"), "", 1, lambda *_: tiny)
    (found,) = map(json.loads, (tmp_path / "raw.jsonl").read_text().splitlines())
    assert Case(**found["case"]) == case and found["device"] == "cpu" and found["rate"] > 0
