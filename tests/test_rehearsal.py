"""The rehearsal in small: every policy, scorer, prompt set and file format of params/paper once,
from files to verified lines.

`make rehearsal` walks through the whole grid with Snakemake and papermill; here the same settings
run in this process.
"""

from pathlib import Path

import pytest
import yaml

from igcore import METHODS
from igstudy.judge import JudgeParams
from igstudy.report import load as runs
from igstudy.report.verdicts import win_rates
from igstudy.runs import critic_run as critic_runs
from igstudy.runs import decode_run
from igstudy.runs.critic_params import CriticParams
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.judge_run import judge_run
from igstudy.runs.paramfiles import ParamFiles
from igstudy.runs.verify import verify
from tests.rehearsal.__main__ import build_mirror
from tests.rehearsal.stub import stub_judge

ROOT = Path(__file__).parents[1]
SMALL = {
    "n_samples": 4, "keep": 2, "token_top_k": 4, "block_size": 4, "max_new_tokens": 8, "limit": 2,
    "group_size": 2,
}  # fmt: skip
CHANGES = yaml.safe_load((ROOT / "params/rehearsal.yaml").read_text())
PAPER = ParamFiles("paper", CHANGES, base=ROOT / "params")
GROUPS = ["alpaca-pku", "vicuna-hex", "llama-hh"]  # all formats of models and sets, all scorers


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    return build_mirror(tmp_path_factory.mktemp("rehearsal") / "hub")


@pytest.fixture
def here(mirror, tmp_path, monkeypatch):
    """A root of its own, with the mirror in the hub's place."""
    monkeypatch.setenv("IGCORE_HUB", str(mirror))
    for module in (decode_run, runs, critic_runs):
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


def test_every_sweep_is_a_run_that_the_notebooks_take(mirror):
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
