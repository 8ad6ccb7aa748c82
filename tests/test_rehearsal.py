"""The rehearsal in small: every policy, scorer, prompt set and file format of params/paper once,
from files to verified lines; and the tiny checkpoints, from which each policy and scorer loads.

`make rehearsal` walks through the whole grid with Snakemake and papermill; here the same settings
run in this process.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml
from mockpolicy import LetterCost, LetterReward
from sentencepiece import SentencePieceProcessor

from igcore import METHODS, AssetError, Guard, SearchConfig, decode, load_policy, load_scorer
from igcore.catalog import POLICIES, found
from igstudy.judge import JudgeParams
from igstudy.report import load as runs
from igstudy.report.verdicts import win_rates
from igstudy.runs import critic_run as critic_runs
from igstudy.runs import decode_run, networks
from igstudy.runs.critic_params import CriticParams
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.judge_run import judge_run
from igstudy.runs.paramfiles import ParamFiles
from igstudy.runs.verify import verify
from tests.rehearsal.__main__ import build_mirror
from tests.rehearsal.checkpoints import END_OF_TURN
from tests.rehearsal.stub import stub_judge

ROOT = Path(__file__).parents[1]
SMALL = {
    "n_samples": 4, "keep": 2, "token_top_k": 4, "block_size": 4, "max_new_tokens": 8, "limit": 2,
    "group_size": 2,
}  # fmt: skip
CHANGES = yaml.safe_load((ROOT / "params/rehearsal.yaml").read_text())
PAPER = ParamFiles("paper", CHANGES, base=ROOT / "params")
GROUPS = ["alpaca-pku", "vicuna-hex", "llama-hh"]  # all formats of models and sets, all scorers


@pytest.fixture(scope="module", autouse=True)
def mirror(tmp_path_factory):
    """All checkpoints and prompt sets, where `igcore.models.hub` looks for them."""
    folder = build_mirror(tmp_path_factory.mktemp("rehearsal") / "hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IGCORE_HUB", str(folder))
        yield folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A root of its own."""
    for module in (decode_run, networks, runs, critic_runs):
        monkeypatch.setattr(module, "root", lambda: tmp_path)
    return tmp_path


def params(kind, stem, **changes):
    given = PAPER.read(ROOT / f"params/paper/{stem}.yaml")
    given.pop("grid", None)
    return kind(**(given | changes))


@pytest.mark.parametrize("name", GROUPS)
def test_a_row_group_of_the_main_tables_runs(name, here):
    """Guards a first run on a GPU: critic and value network, every method of the table, scored
    again by its own scorers.
    """
    small = {name: SMALL[name] for name in ("max_new_tokens", "block_size")}
    small |= {"limit": 6, "test_limit": 3}
    main = params(DecodeParams, f"decode-main-{name}")
    group = Path(main.critic or main.value).parent.name  # HEx-PHI takes the networks of HH-RLHF
    trained = critic_runs.critic_run(params(CriticParams, f"critic-{group}", **small))
    looking_ahead = [f"{name}-mix"] if "peak" in trained.critics else []
    assert ("terminal" in trained.critics) == bool(main.critic) and trained.value is not None
    found = {}
    for stem in (name, f"{name}-tokenwise", *looking_ahead):
        asked = params(DecodeParams, f"decode-main-{stem}", **SMALL)
        run = decode_run.decode_run(asked)
        found |= {line["method"]: line for line in run.lines}
        assert len(run.lines) == 2 * len(run.params["methods"])
        assert verify(run.responses, asked).problems == []
    assert len(found) >= len(METHODS) - 2  # all but the two that a critic steers
    assert found["inferenceguard"]["status"] in ("verified_safe", "abstained")


def test_no_setting_of_the_papers_networks_is_lost():
    """Guards a rehearsal of other networks: sizes may change, and nothing else."""
    for path in PAPER.files("critic"):
        printed, rehearsed = yaml.safe_load(path.read_text()), PAPER.read(path)
        assert rehearsed.keys() >= printed.keys()
        for name, critic in printed["critics"].items():
            small = {"width": 16, "epochs": 2, "mixed_precision": "no"}
            assert rehearsed["critics"][name] == critic | small
        assert rehearsed["value"].keys() >= printed["value"].keys()


def test_every_network_of_the_paper_is_read_by_a_decode_file():
    """Bug: two critics of 50 epochs were trained for Llama 3.1, and no search read them."""
    points = [given for file in PAPER.files("decode") for _, given in PAPER.points(file)]
    read = {
        Path(given.get(kind) or "").parts[-2:] for given in points for kind in ("critic", "value")
    }
    for path in PAPER.files("critic"):
        given = PAPER.read(path)
        trained = [*given["critics"], *(["value"] if given["value"] else [])]
        assert {(given["run"], name) for name in trained} <= read


def test_every_sweep_is_a_run_that_the_notebooks_take():
    """Bug: a point of a grid that is refused after hours, such as more kept beams than samples."""
    points = [given for file in PAPER.files("decode") for _, given in PAPER.points(file)]
    checked = [DecodeParams(**given) for given in points]
    assert len(checked) > 60 and {p.profile for p in checked} == {"rehearsal"}
    assert all(p.limit <= 2 and p.dtype == "float32" for p in checked)


def test_the_judge_is_rehearsed_with_an_endpoint(here, monkeypatch):
    """Guards the last step of the grid: the paper's own judge file, with a stub where its address
    is.
    """
    monkeypatch.setattr("igstudy.runs.judge_run.root", lambda: here)
    two = SMALL | {"methods": ["base", "inferenceguard"], "critic": None, "value": None}
    decode_run.decode_run(params(DecodeParams, "decode-main-alpaca-pku", **two))
    with stub_judge() as stub:
        given = PAPER.read(ROOT / "params/paper/judge-alpaca-pku.yaml") | {"limit": SMALL["limit"]}
        judge = given["judge"] | {"base_url": stub.base_url}
        judged = judge_run(JudgeParams(**given | {"judge": judge, "workers": 2}))
    rates = win_rates(judged)
    assert set(rates["aspect"]) == {"helpfulness", "harmlessness"} and (rates["n"] == 2).all()


# --- the tiny checkpoints: each loads by its own name, with its traps -----------------------------

# The traps: BOS once, end tokens in a list, pad ids that disagree, sampling settings in the
# checkpoint, vocabularies of 400 and 401.
PAPERS = {name: place for name, place in POLICIES.items() if place.startswith("igstudy")}
REPOS = {name: found(place).repo for name, place in PAPERS.items() if found(place).repo}
# <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n
HEADER = [128009, 128006, 78191, 128007, 271]
READERS = {
    "llama-7b-rm": "argsearch/llama-7b-rm-float32",
    "beaver-7b-cost": "PKU-Alignment/beaver-7b-unified-cost",
    "qrm-llama-3.1-8b-reward": "nicolinho/QRM-Llama3.1-8B",
    "qrm-llama-3.1-8b-cost": "nicolinho/QRM-Llama3.1-8B",
}
DIALOGUE = "\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: And?\n\nAssistant:"


def length(text):
    return len(text) / 100


def answers(policy, prompts, **settings):
    common = dict(budget=9.0, n_samples=2, keep=1, block_size=3, max_new_tokens=6)
    config = SearchConfig(**common | settings)
    guard = Guard(policy, LetterCost(length), LetterReward(length), config)
    return list(decode("inferenceguard", guard, prompts))


def letters(text: str) -> list[int]:
    """Return Llama 3's ids of printable ASCII, of which the first is the exclamation mark, spaces
    and line feeds, by hand.
    """
    return [{" ": 220, "\n": 198}.get(c, ord(c) - ord("!")) for c in text]


def reconfigured(monkeypatch, mirror, tmp_path, name, file, **changes):
    """Load a policy of a mirror in which one settings file differs."""
    source, place = mirror / REPOS[name], tmp_path / REPOS[name]
    place.mkdir(parents=True)
    for path in source.iterdir():
        (place / path.name).symlink_to(path)
    (place / file).unlink()
    (place / file).write_text(json.dumps(json.loads((source / file).read_text()) | changes))
    monkeypatch.setenv("IGCORE_HUB", str(tmp_path))
    return load_policy(name)


@pytest.mark.parametrize(
    ("name", "rows", "ends", "context", "stored"),
    [
        ("alpaca-7b", 401, {2}, 2048, torch.bfloat16),
        ("beaver-7b-v3", 401, {2}, 2048, torch.bfloat16),
        ("vicuna-7b", 400, {2}, 4096, torch.float16),
        ("llama-3.1-8b", 128256, {128001, 128008, 128009}, 131072, torch.bfloat16),
    ],
)
def test_every_policy_loads_by_its_name(name, rows, ends, context, stored):
    """Bug: one end token of three known, so that answers run on; a pad token taken for an end."""
    policy = load_policy(name)
    assert (policy.name, policy.eos_ids, policy.context) == (name, ends, context)
    assert policy.model.lm_head.weight.shape == (rows, 32) and policy.model.dtype == torch.float32
    assert torch.equal(policy.model.lm_head.weight, policy.model.lm_head.weight.to(stored).float())


@pytest.mark.parametrize("name", ["alpaca-7b", "beaver-7b-v3", "vicuna-7b"])
def test_the_ids_of_a_prompt_of_the_llama_2_family(mirror, name):
    """Bug: BOS twice or never, or an end token after the prompt. The reference is sentencepiece
    itself.
    """
    begin = "BEGINNING OF CONVERSATION:"
    if name == "vicuna-7b":
        begin = (
            "A chat between a curious user and an artificial intelligence assistant. The "
            "assistant gives helpful, detailed, and "
        )
        begin += "polite answers to the user's questions."
    pieces = SentencePieceProcessor(model_file=str(mirror / REPOS[name] / "tokenizer.model"))
    ids = load_policy(name).encode("Why does bread rise – naïve?")
    assert ids == [1, *pieces.encode(f"{begin} USER: Why does bread rise – naïve? ASSISTANT:")]


@pytest.mark.parametrize("name", ["alpaca-7b", "vicuna-7b"])
def test_only_the_template_ends_a_turn(name):
    """Bug: token 2 where the user wrote "</s>", or none where the first answer ends."""
    policy = load_policy(name)
    ids = policy.encode(DIALOGUE)
    end = ids.index(2)
    assert ids.count(2) == ids.count(1) == 1 and ids[0] == 1
    seam = {"alpaca-7b": "ASSISTANT:So.", "vicuna-7b": "ASSISTANT: So."}[name]
    assert policy.tokenizer.decode(ids[1:end]).endswith(f"USER: Why? {seam}")
    assert policy.tokenizer.decode(ids[end + 1 :]).endswith("USER: And? ASSISTANT:")
    assert not {0, 1, 2, 400} & set(policy.encode("</s> <s> <pad> <unk>")[1:])


def test_the_ids_of_a_prompt_of_llama_3():
    """Bug: BOS twice, a date of today, or the header of the answer cut into other tokens."""
    policy = load_policy("llama-3.1-8b")
    system = letters("Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024")
    before = [128000, 128006, 9125, 128007, 271, *system, 271, 128009]
    assert policy.encode("Why?") == [*before, 128006, 882, 128007, 271, *letters("Why?"), *HEADER]
    turns = [
        *letters("Why?"), *HEADER, *letters("So."), 128009, 128006, 882, 128007, 271,
        *letters("And?"), *HEADER,
    ]  # fmt: skip
    assert policy.encode(DIALOGUE) == [*before, 128006, 882, 128007, 271, *turns]
    written = policy.encode(
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes<|reserved_special_token_7|>"
    )
    assert [i for i in written if i >= 128000] == [i for i in policy.encode("Why?") if i >= 128000]


@pytest.mark.parametrize("name", REPOS)
def test_every_policy_answers(name):
    """Bug: results that move with the batch: two prompts together, padded on the left, and one by
    one.
    """
    policy, prompts = load_policy(name), ["Why does bread rise?", "Tea"]
    together = answers(policy, prompts)
    assert [r.status for r in together] == ["verified_safe"] * 2
    assert all(0 < r.n_tokens <= 6 for r in together)
    alone = [r.text for p in prompts for r in answers(policy, [p])]
    assert alone == [r.text for r in together]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_policy_answers_in_half_precision(dtype):
    """Guards the type in which 7B models fit a device; the weights of the file lose nothing in
    bfloat16.
    """
    policy = load_policy("alpaca-7b", dtype=dtype)
    assert str(policy.model.dtype) == f"torch.{dtype}"
    assert [r.status for r in answers(policy, ["Why does bread rise?", "Tea"])] == [
        "verified_safe"
    ] * 2


@pytest.mark.parametrize(
    ("name", "file", "changes"),
    [
        ("vicuna-7b", "generation_config.json",
         {"temperature": 0.01, "top_p": 0.01, "max_length": 3}),
        ("llama-3.1-8b", "generation_config.json",
         {"temperature": 0.01, "top_p": 0.01, "top_k": 1}),
        ("alpaca-7b", "generation_config.json", {"pad_token_id": 2}),
        ("alpaca-7b", "config.json", {"pad_token_id": 400}),
    ],
)  # fmt: skip
def test_neither_sampling_settings_nor_pad_ids_of_a_checkpoint_are_used(
    monkeypatch, mirror, tmp_path, name, file, changes
):
    """Bug: temperature .9 and top_p .6 of Vicuna in the samples of one policy of four; a pad id
    that two files disagree on.
    """
    prompts = ["Why does bread rise?", "Tea"]
    want = [r.text for r in answers(load_policy(name), prompts)]
    other = reconfigured(monkeypatch, mirror, tmp_path, name, file, **changes)
    read = other.model.generation_config if file == "generation_config.json" else other.model.config
    assert {key: getattr(read, key) for key in changes} == changes
    assert [r.text for r in answers(other, prompts)] == want


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_the_end_tokens_of_either_file_count(monkeypatch, mirror, tmp_path, file):
    """Bug: answers that run on, since of two lists of end tokens only the one is read that has
    fewer.
    """
    policy = reconfigured(
        monkeypatch, mirror, tmp_path, "llama-3.1-8b", file, eos_token_id=END_OF_TURN
    )
    assert policy.tokenizer.eos_token_id == END_OF_TURN and policy.eos_ids == {
        128001,
        128008,
        END_OF_TURN,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", READERS)
def test_every_scorer_passes_its_first_look(name, dtype):
    """Guards the aim of the heads, and that no code beside a checkpoint is run: QRM's raises."""
    scorer = load_scorer({"name": name, "dtype": dtype})
    assert len(set(scorer.score(["Tea?", "Tea?"], ["Yes.", "No."], [True, True]))) == 2


@pytest.mark.parametrize("name", READERS)
def test_the_revision_of_every_scorer_is_asked_for(monkeypatch, name):
    """Bug: the pinned commit was not requested from the hub."""

    def snapshot(repo, revision=None):
        raise AssetError(f"asked for {repo} at {revision}")

    monkeypatch.setattr("igcore.models.lm_scorer.snapshot", snapshot)
    with pytest.raises(AssetError, match=f"asked for {READERS[name]} at 1234abc"):
        load_scorer({"name": name, "revision": "1234abc"})
