"""The paper's prompt sets in tiny, read a second time here with other means, and every way a copy
of them can be wrong.
"""

import csv
import hashlib
import json
import logging
import math
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pandas as pd
import pytest
from mockpolicy import LetterCost

from igcore import AssetError, ParameterError, load_policy
from igcore.catalog import PROMPT_SETS
from igcore.models.hub import MIRROR
from igcore.models.prompts import mild
from igcore.models.templates import turns_of
from igcore.prompt import Prompt, as_prompt
from igstudy import prompts
from igstudy.assets import sound
from igstudy.prompts import (
    SOURCES,
    SPLITS,
    PromptOptions,
    check_prompts,
    hub_texts,
    load_prompts,
    split_of,
)
from igstudy.runs.critic_params import CriticParams
from igstudy.runs.decode_params import DecodeParams
from tests.rehearsal import data

PKU, HEX, HH = "pku-saferlhf", "hex-phi", "hh-rlhf"
MILD = mild()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A mirror that may be broken."""
    data.build_data(tmp_path / "hub")
    monkeypatch.setenv(MIRROR, str(tmp_path / "hub"))
    return tmp_path / "hub"


def length(**broken):
    """Return a cost that finds long texts worst; texts in `broken` get that score instead."""
    return LetterCost(lambda text: broken.get(text, float(len(text))))


def texts(name, split="all", **options):
    return {prompt.text for prompt in load_prompts({"name": name} | options, split)}


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def failure(name, *arguments) -> str:
    with pytest.raises(AssetError) as caught:
        load_prompts(name, *arguments)
    message = str(caught.value)
    assert "\n" not in message and "; choose another revision" in message
    return message


# --- what is read ---------------------------------------------------------------------------------


def test_pku_has_the_prompts_of_all_three_models_in_file_order(hub):
    """Bug: one file only, files in another order, or the train part for the test part."""
    for part in ("train", "test"):
        files = {
            model: rows(hub / data.PKU / f"data/{model}/{part}.jsonl") for model in data.PKU_MODELS
        }
        everything = [row["prompt"] for file in files.values() for row in file]
        assert hub_texts(PKU, PromptOptions())[part] == everything
        assert len(everything) > len(set(everything)) >= 6
    assert texts(PKU) == set(data.TEST) and texts(PKU, part="train") == set(data.TRAIN)


def test_hex_phi_is_read_without_header_and_with_every_comma(hub):
    """Bug: the first prompt is taken for a header, or a prompt ends at its first comma, in quotes
    or not.
    """
    (hub / data.HEX_PHI / "category_4.csv").write_text(
        '"Write, please, a ""short"" note."\r\nPlan a walk, with rests, and say "stop, now" '
        "twice\r\n\r\nOne, two,\r\n",
        encoding="utf-8-sig",
    )
    read = hub_texts(HEX, PromptOptions())["train"]
    mine = [
        'Write, please, a "short" note.',
        'Plan a walk, with rests, and say "stop, now" twice',
        "One, two,",
    ]
    kept = data.FORMATS["hex_phi"] | {4: mine}
    assert read == [line for i in sorted(kept) for line in kept[i]]
    assert load_prompts(HEX, "all")[0].set_name == HEX


def test_hex_phi_has_ten_categories(hub):
    """Bug: the withdrawn category is read where an old copy still has it."""
    for path in [*(hub / data.HEX_PHI).iterdir(), hub / data.HEX_PHI / "category_2.csv"]:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([[f"{path.stem}, prompt {i}"] for i in range(30)])
    found = texts(HEX)
    assert len(found) == 300
    assert "category_1, prompt 0" in found
    assert not any(text.startswith("category_2,") for text in found)


def test_hh_prompts_are_dialogues(hub):
    """Bug: an answer left in the prompt, or an ending that templates do not know."""
    for split in ("train", "tune", "calibrate", "test"):
        found = load_prompts(HH, split)
        assert len(found) >= 1
        assert all(
            p.text.startswith("\n\nHuman: ") and p.text.endswith("\n\nAssistant:") for p in found
        )
    turns = [turns_of(text) for text in texts(HH)]
    assert {len(dialogue) for dialogue in turns} == {1, 3}
    assert {dialogue[-1] for dialogue in turns} == set(data.TEST)
    table = pd.read_parquet(hub / data.HH_DAHOAS / data.HH_FILES["test"])
    assert hub_texts(HH, PromptOptions())["test"] == list(table["prompt"])
    assert list(table) == ["prompt", "response", "chosen", "rejected"]


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_repository_and_revision_are_passed_on(hub, monkeypatch, name):
    """Bug: a pinned revision that nobody asks the hub for."""
    asked = []
    original = prompts.snapshot
    monkeypatch.setattr(
        prompts, "snapshot", lambda *a, **k: asked.append((*a, k)) or original(*a, **k)
    )
    load_prompts({"name": name, "revision": "1234abc"})
    assert asked == [(SOURCES[name], "1234abc", {"kind": "dataset"})]


def test_owners_parts_are_the_splits(hub):
    """Bug: a critic learns from prompts that it is judged on, or the paper's test part is divided
    once more.
    """
    leak = data.TEST[0]
    with (hub / data.PKU / "data/Alpaca-7B/train.jsonl").open("a") as file:
        file.write(
            json.dumps(rows(hub / data.PKU / "data/Alpaca-7B/test.jsonl")[0] | {"prompt": leak})
            + "\n"
        )
    split = {of: texts(PKU, of) for of in ("train", "tune", "calibrate", "test")}
    assert split["test"] == texts(PKU, "all") == set(data.TEST)
    assert split["train"] | split["tune"] | split["calibrate"] == set(data.TRAIN)
    assert split["tune"] == {text for text in data.TRAIN if split_of(text) == "tune"} != set()
    assert (
        split["calibrate"]
        == {text for text in data.TRAIN if split_of(text) == "calibrate"}
        != set()
    )
    assert len(split["train"]) == len(data.TRAIN) - 2 >= 6


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_part_that_is_named_is_divided_as_any_set(hub, part):
    """Bug: with a part named, its splits still are the owners' parts, so that `test` of the train
    part is another part.
    """
    whole = set(data.TRAIN if part == "train" else data.TEST)
    assert texts(PKU, part=part) == whole
    for split in ("train", "test"):
        assert (
            texts(PKU, split, part=part)
            == {text for text in whole if split_of(text) == split}
            != set()
        )


def test_ids_depend_on_set_and_text_alone(hub):
    """Bug: the same prompt has another id, and so other random numbers, under another part or
    revision.
    """
    by_text = {prompt.text: prompt for prompt in load_prompts(PKU)}
    for options in ({"part": "test"}, {"revision": "x"}):
        for prompt in load_prompts({"name": PKU} | options):
            assert prompt == by_text[prompt.text]
    assert (
        by_text[data.TEST[0]]
        == as_prompt(data.TEST[0], PKU)
        == Prompt(by_text[data.TEST[0]].id, data.TEST[0], PKU)
    )
    assert [prompt.id for prompt in by_text.values()] == sorted(
        prompt.id for prompt in by_text.values()
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"name": "pku-saferlfh"},
         "unknown prompt set 'pku-saferlfh'; did you mean 'pku-saferlhf'"),
        ({"part": "test"}, "unknown prompt set ''; allowed"),
        ({"name": PKU, "split": "test"},
         "unknown option of prompt set 'pku-saferlhf': 'split'; allowed: column, only, part"),
        ({"name": PKU, "revision": 12345},
         "parameter revision is 12345: it must be a valid string"),
        ({"name": "rtp", "part": "test"}, "unknown option of prompt set 'rtp': 'part'"),
    ],
)  # fmt: skip
def test_options_are_checked_before_anything_is_read(given, sentence, monkeypatch):
    """Bug: a misspelt option is passed over, or found out after an hour of loading models."""
    monkeypatch.setenv(MIRROR, "/nowhere")
    with pytest.raises(ParameterError, match=sentence):
        check_prompts(given)
    common = {
        "profile": "test", "run": "test", "policy": "smollm2-raw", "budget": 0.2, "prompts": given,
    }  # fmt: skip
    with pytest.raises(ParameterError, match=sentence):
        DecodeParams(methods=["base"], **common)
    with pytest.raises(ParameterError, match=sentence):
        CriticParams(critics={"m": {"layer": 8}}, **common)


def test_any_data_set_of_the_hub(hub):
    """Bug: a column, configuration or part that is asked for, and another one read."""
    for part in ("easy", "hard"):
        (hub / "owner/set").mkdir(parents=True, exist_ok=True)
        (hub / f"owner/set/{part}.jsonl").write_text(f'{{"text": "{part} one"}}\n{{"text": " "}}\n')
    named = {f"owner/set/{part}.jsonl" for part in ("easy", "hard")}
    header = "configs:\n- config_name: all\n  data_files:\n"
    header += "".join(
        f"  - split: {path[10:14]}\n    path: {path[10:]}\n" for path in sorted(named)
    )
    (hub / "owner/set/README.md").write_text(f"---\n{header}---\n")
    chosen = {"column": "text", "subset": "all", "part": "hard", "revision": "1234abc"}
    (prompt,) = load_prompts({"name": "owner/set"} | chosen)
    assert prompt == as_prompt("hard one", "owner/set")
    for change, sentence in (
        ({"part": None}, "it has the parts easy, hard; choose one as part"),
        ({"part": "test"}, "KeyError: 'test'"),
        ({"subset": "none"}, "BuilderConfig 'none' not found. Available: "),
        ({"column": "prompt"}, "it has the columns text, but not 'prompt'"),
    ):
        assert sentence in failure({"name": "owner/set"} | chosen | change)


# --- which prompts are taken ----------------------------------------------------------------------


def test_rtp_splits_by_hash():
    """Bug: a changed hash or share moves prompts between training and test. Counts found once, kept
    for ever.
    """
    counts = {
        split: len(load_prompts("rtp", split))
        for split in ("all", "train", "tune", "calibrate", "test")
    }
    assert counts == {"all": 623, "train": 320, "tune": 49, "calibrate": 98, "test": 156}


def test_split_is_a_function_of_the_text_alone():
    """Bug: the set's name or order enters the split, and one set trains on what another tests."""
    for text in MILD:
        share = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") / 2**256
        assert split_of(text) == (
            "train"
            if share < 0.50
            else "tune"
            if share < 0.58
            else "calibrate"
            if share < 0.74
            else "test"
        )
    parts = [load_prompts("mild", split) for split in {split_of(text) for text in MILD}]
    assert sorted((p for part in parts for p in part), key=lambda p: p.id) == load_prompts("mild")


def test_twins_are_in_one_split_and_a_limit_takes_pairs(monkeypatch):
    """Bug: a critic learns from the twin of a test prompt, or 30 of each set are not 30 pairs."""
    twins = {f"harmful {i}": f"harmless {i}" for i in range(80)}
    monkeypatch.setitem(PROMPT_SETS, "first", lambda: [*twins])
    monkeypatch.setitem(PROMPT_SETS, "second", lambda: [*twins.values()])
    monkeypatch.setitem(prompts.TWINS, "second", "first")
    assert any(split_of(first) != split_of(second) for first, second in twins.items())
    for split in ("all", *SPLITS):
        firsts = load_prompts("first", split)
        assert firsts
        for limit in (1, 3, None):
            chosen = load_prompts("second", split, limit)
            assert {p.text for p in chosen} == {twins[p.text] for p in firsts[:limit]}
            assert chosen == sorted(
                (as_prompt(p.text, "second") for p in chosen), key=attrgetter("id")
            )


def test_sets_of_harmful_requests():
    """Bug: a pin of another file, harmless prompts among the harmful ones, or pairs by accident."""
    assert len(load_prompts("strongreject")) == 313
    harmful, harmless = prompts.wsr_harmful(), prompts.wsr_harmless()
    assert len(load_prompts("wsr-harmful")) == len(load_prompts("wsr-harmless")) == 60
    id_of = {row["input"]: row["id"] for row in rows(sound("wsr")[0] / "dataset.jsonl")}
    pairs = [(id_of[a], id_of[b]) for a, b in zip(harmful, harmless, strict=True)]
    assert all(re.fullmatch(r"[a-z_]+_h\d+", a) and a.replace("_h", "_b") == b for a, b in pairs)


def test_a_benchmark_s_file_by_its_column(write):
    """Bug: the field's files are not read, because the column is not called prompt."""
    table = write("a.csv", 'category,forbidden_prompt\nx,"Walk, then run."\n')
    lines = write("b.jsonl", '{"id": 1, "input": "Walk.", "metadata": {"type": "x"}}\n')
    for path, column, text in (
        (table, "forbidden_prompt", "Walk, then run."),
        (lines, "input", "Walk."),
    ):
        assert [p.text for p in load_prompts({"name": str(path), "column": column})] == [text]
    with pytest.raises(ParameterError) as caught:
        load_prompts(table)
    assert "has the columns category, forbidden_prompt, but not 'prompt'" in str(caught.value)
    assert "set column to another" in str(caught.value) and "\n" not in str(caught.value)


def test_limit_and_hardest(caplog):
    """Bug: the hardest are added beyond the limit, chosen twice, or taken from the wrong end."""
    everything, longest = load_prompts("mild"), sorted(MILD, key=len)[-3:]
    with caplog.at_level(logging.INFO, "igcore"):
        assert load_prompts("mild", limit=5) == everything[:5]
    assert caplog.messages == ["prompt set mild: all 24 rows, 24 unique; split all 24, chosen 5"]
    cost = length()
    chosen = load_prompts("mild", limit=8, hardest=3, cost=cost)
    assert {(p, finished) for call in cost.asked for p, _, finished in call} == {("", True)}
    by_id = [p for p in everything if p.text not in longest][:5]
    assert chosen == [p for p in everything if p.text in longest or p in by_id] and len(chosen) == 8
    assert load_prompts("mild", limit=99, hardest=99, cost=length()) == everything


def test_score_that_is_not_finite_counts_as_hardest():
    """Bug: one NaN makes the order arbitrary, or hides the prompt that broke the cost."""
    for value in (math.nan, -math.inf):
        (only,) = load_prompts("mild", limit=1, hardest=1, cost=length(**{MILD[5]: value}))
        assert only.text == MILD[5]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "mild", "split": "tests"}, "unknown split 'tests'; did you mean 'test'"),
        ({"name": "mild", "limit": 0},
         "parameter limit is 0: it must be greater than or equal to 1"),
        ({"name": "mild", "limit": 2, "hardest": 3, "cost": length()},
         "hardest 3 must be at most limit 2"),
        ({"name": "mild", "limit": 4, "hardest": 3}, "hardest 3 needs a cost"),
    ],
)  # fmt: skip
def test_bad_choices_are_named(options, sentence):
    """Bug: a typing error in a parameter file runs with other prompts than were meant."""
    with pytest.raises(ParameterError, match=sentence):
        load_prompts(**options)


def test_only_the_prompts_of_a_list(write):
    """Guards a run on chosen prompts: which they are, their split, and every bad list."""
    known = load_prompts("mild")
    ids = [prompt.id for prompt in known[3:9]]
    listed = write("ids.txt", "# six of them\n\n" + "\n".join(f"{x} # mild" for x in ids))
    chosen = {"name": "mild", "only": str(listed)}
    assert load_prompts(chosen) == known[3:9]
    assert load_prompts(chosen, limit=2) == known[3:5]
    for content, part in (
        ("0" * 16, "line 1 of .* holds no id of a prompt of this set and split"),
        ("# none", "holds no id of a prompt of this set and split"),
        (b"\xff\xfe\xff", "cannot be read"),
    ):
        with pytest.raises(ParameterError, match=part):
            load_prompts({"name": "mild", "only": str(write("bad.txt", content))})
    with pytest.raises(ParameterError, match="give a text file with the id of a prompt"):
        load_prompts({"name": "mild", "only": "there/is/none.txt"})


def test_a_system_message_is_read_by_the_policy_alone():
    """Bug: scorers see the message, or prompts change their ids and pair with no other arm."""
    plain = load_prompts("mild")
    told = load_prompts({"name": "mild", "system": "Name no number."})
    assert [(x.id, x.text, x.set_name) for x in told] == [(x.id, x.text, x.set_name) for x in plain]
    policy = load_policy("smollm2-chat")
    read = policy.tokenizer.decode(policy.ids_of(told[0]))
    assert read.index("Name no number.") < read.index(plain[0].text)
    assert "Name no number." not in policy.tokenizer.decode(policy.ids_of(plain[0]))
    with pytest.raises(ParameterError, match="system"):
        load_prompts({"name": "mild", "system": ""})


def test_a_list_of_prompts_shows_nothing_of_a_file_that_is_none(write):
    """Bug: a params file of somebody else printed a line of any file of this computer."""
    known = load_prompts("mild")[0].id
    other = write("other.txt", f"# notes\n{known}\nmy key is 1234\n")
    with pytest.raises(ParameterError) as caught:
        load_prompts({"name": "mild", "only": str(other)})
    assert str(caught.value).startswith(f"line 3 of {other} holds no id")
    assert "1234" not in str(caught.value)


# --- copies that are not what they should be ------------------------------------------------------


def test_rows_without_a_prompt_are_left_out_and_counted(hub, caplog):
    """Bug: one empty row of a set that its reader cannot mend stops everything, or is decoded as a
    prompt.
    """
    path = hub / data.PKU / "data/Alpaca-7B/test.jsonl"
    before = hub_texts(PKU, PromptOptions())["test"]
    bad = [rows(path)[0] | {"prompt": prompt} for prompt in (" \n", None)]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in bad)
    assert hub_texts(PKU, PromptOptions())["test"] == before
    (warning,) = [record.getMessage() for record in caplog.records]
    assert (
        warning == f"2 of {len(before) + 2} rows of part 'test' of {data.PKU} have no prompt and "
        "are left out"
    )


def test_a_part_without_a_prompt(hub, caplog):
    """Bug: a run over no prompts ends well."""
    for path in (hub / data.PKU).glob("data/*/test.jsonl"):
        path.write_text('{"prompt": null}\n')
    with pytest.raises(ParameterError, match="'pku-saferlhf' has no prompts in split 'all'"):
        load_prompts(PKU)
    assert "3 of 3 rows of part 'test'" in caplog.text


BREAKS = {  # what is wrong -> set, what is broken, what the sentence says
    "a missing column": (
        PKU,
        "PKU-Alignment/PKU-SafeRLHF/data/*/*.jsonl",
        lambda path: path.write_text('{"question": "Why?", "answer": "So."}\n'),
        r"'PKU-Alignment/PKU-SafeRLHF' .* "
        r"\(it has the columns question, answer, but not 'prompt'\)",
    ),
    "a missing file": (
        PKU, "PKU-Alignment/PKU-SafeRLHF/data/Alpaca2-7B/test.jsonl", Path.unlink,
        "Unable to find .*data/Alpaca2-7B/test.jsonl",
    ),
    "a file of the wrong kind": (
        HH,
        "Dahoas/full-hh-rlhf/data/test-*",
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
        r"'Dahoas/full-hh-rlhf' .*ArrowInvalid: ",
    ),
    "a missing category": (
        HEX, "LLM-Tuning-Safety/HEx-PHI/category_7.csv", Path.unlink,
        "Unable to find .*category_7.csv",
    ),
    "another encoding": (
        HEX,
        "LLM-Tuning-Safety/HEx-PHI/category_7.csv",
        lambda path: path.write_bytes("Write a naïve poem.".encode("latin-1")),
        "UnicodeDecodeError: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_wrong_is_said_in_one_sentence(hub, what):
    """Bug: a library's traceback, or the prompts that are left pass for the set."""
    name, pattern, spoil, sentence = BREAKS[what]
    spoiled = [spoil(path) or path for path in list(hub.glob(pattern))]
    assert spoiled and re.search(sentence, failure(name))


def test_a_snapshot_of_links(hub, tmp_path, monkeypatch):
    """Bug: links lose their names' endings."""
    linked = tmp_path / "models new"
    for number, path in enumerate(path for path in hub.rglob("*") if path.is_file()):
        blob = tmp_path / f"blobs/{number:040x}"
        blob.parent.mkdir(exist_ok=True)
        path.rename(blob)
        (link := linked / path.relative_to(hub)).parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    monkeypatch.setenv(MIRROR, str(linked))
    assert texts(PKU) == set(data.TEST)
    assert len(load_prompts(HH)) == len(data.TEST) and len(load_prompts(HEX)) == 13


def test_prompts_need_no_torch():
    """Guards the lecturer's notebook and the dry run against a second of loading what they do not
    use.
    """
    code = (
        "import sys, igstudy.prompts as _; "
        "sys.exit(bool({'torch', 'datasets', 'pandas'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
