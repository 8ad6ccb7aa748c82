"""Tests of the Snakefile by Snakemake's own machinery: what reaches a notebook, what runs again,
what stops at once, and what Snakemake knows of a job.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import papermill
import pytest
import yaml
from copiedcode import edit, forget, know_code_from
from imaginaryruns import snakemake
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from snakemake import cli

from docs.records import pack
from igcore.errors import RunError
from igcore.settings import written
from igserve.yamlfile import read_yaml
from igstudy import commands, provenance
from igstudy.provenance import UNPACKED
from igstudy.runs import jobs
from igstudy.runs.paramfiles import ParamFiles, runs_of
from igstudy.runs.params import notebook_params

ROOT = Path(__file__).parents[1]
SHIPPED = sorted({path.parent.name for path in (ROOT / "params").glob("*/*.yaml")})
ODD = {  # what YAML takes for other things than it is, or an encoding loses
    "budget": "1.0e-5",
    "lagrange_multiplier": "1.0e+16",
    "refusal": '"No \U0001f64f, sorry.\u2028 \'12:30:45\' \\\\ \\"$(x)\\" {y} '
    '\u00e9\\n # %s\\t\\x85"',
    "score_threshold": "-0.0",
    "reward": "null",
    "strict": "True",
}
LOOKS = ["2024-01-01", "no", "1e5", "1_000", "0x10", "007", "null", "-1"]  # text in quotes
# kind of a params file, its name up to the first hyphen -> its notebook
KINDS = {
    "critic": "20_train_critic", "decode": "30_decode", "regime": "30_decode", "judge": "60_judge",
}  # fmt: skip
CRITICS = '{"0": {features: o, lr: 1.0e-5, epochs: 1}, "no": {lr: 1.0e-300, weight_decay: 1.0e+16}}'


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder to walk in, with the notebooks."""
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    return tmp_path


def write_params(place, name, sample, **lines):
    """Write params/mine/<name>.yaml: a file of params/ci, with some settings as YAML texts of their
    own.
    """
    given = yaml.safe_load((ROOT / f"params/ci/{sample}.yaml").read_text())
    kept = {setting: value for setting, value in given.items() if setting not in lines}
    text = yaml.safe_dump(kept, sort_keys=False)
    text += "".join(f"{setting}: {value}\n" for setting, value in lines.items())
    path = place / f"params/mine/{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("profile.yaml").write_text("notebooks: {}\n")
    path.write_text(text, encoding="utf-8")


def planned(place, profile, **config) -> dict[str, list[str]]:
    """Return the command behind ``igstudy run`` of each notebook that the jobs would write.

    A job of several runs writes several.
    """
    printed = snakemake(place, profile, "--dry-run", "--printshellcmds", **config)
    begin = " -m igstudy run "
    commands = {}
    for line in printed.splitlines():
        if begin not in line:
            continue
        command = shlex.split(line.partition(begin)[2])
        written = [command[1]]
        if "{run}" in command[1]:
            settings = yaml.safe_load((place / command[command.index("-f") + 1]).read_text())
            written = [command[1].replace("{run}", run) for run, _ in runs_of(settings, "a job")]
        commands |= dict.fromkeys(written, command)
    return commands


# --- what reaches a notebook ----------------------------------------------------------------------


def shipped(place, profile):
    """Yield the notebook's name and the settings of every run of a profile, as the files say."""
    figures = f"runs/{profile}/figures"
    about = place / "params" / profile / "profile.yaml"
    for path in sorted(about.parent.glob("*.yaml")):
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        kind = path.stem.partition("-")[0]
        if kind not in KINDS:
            continue
        placed = {"profile": profile, "run": path.stem}
        if kind in ("critic", "judge"):
            placed["run"] = path.stem.partition("-")[2]
        if kind == "judge":
            placed["figures"] = figures
        given, notebook = placed | given, KINDS[kind]
        grid = given.pop("grid", {})
        points = given.pop("points", {None: {}}).items()
        for (point, own), *values in itertools.product(points, *grid.values()):
            names = [point] if point else []
            names += [
                f"{name}-{value}".replace(".", "_")
                for name, value in zip(grid, values, strict=True)
            ]
            run = {"run": "-".join([given["run"], *names])}
            yield notebook, given | own | dict(zip(grid, values, strict=True)) | run
    told = yaml.safe_load(about.read_text()) if about.exists() else {"notebooks": {}}
    for notebook, asked in told["notebooks"].items():
        given = asked.get("given", {})
        if notebook == "80_claims":
            given = {"claims": told["claims"], "pilot": told.get("pilot", False)} | given
        yield notebook, {"profile": profile, "figures": figures, **given}


def reached(command, monkeypatch) -> list[tuple[str, dict]]:
    """Return the notebook and the parameters of each call of papermill that a job makes."""
    caught = []
    with monkeypatch.context() as instead:

        def execute(notebook, output, parameters, **_):
            caught.append((Path(notebook).stem, parameters))

        instead.setattr(papermill, "execute_notebook", execute)
        assert commands.main(["run", *command]) == 0
    return caught


@cache
def own_cell(notebook: str) -> tuple:
    """Return a notebook with its cell of parameters alone, and the line that checks them."""
    node = load_notebook_node(str(ROOT / f"notebooks/{notebook}.ipynb"))
    code = [cell for cell in node.cells if cell.cell_type == "code"]
    (own,) = [cell for cell in code if "parameters" in cell.metadata.tags]
    lines = "\n".join(cell.source for cell in code).splitlines()
    (check,) = [line for line in lines if line.startswith("params = notebook_params(")]
    node.cells = [own]
    return node, check


def cells(notebook: str, parameters: dict) -> list[str]:
    """Return the notebook's own cell of parameters, the one that papermill puts behind it, and the
    line that checks both.
    """
    node, check = own_cell(notebook)
    return [cell.source for cell in parameterize_notebook(node, parameters).cells] + [check]


def checked(sources: list[str]):
    """Run the cells as a kernel would, and return what the notebook then has."""
    namespace = {"In": sources[:2], "notebook_params": notebook_params}
    for source in sources:
        exec(source, namespace)
    return namespace["params"]


@pytest.mark.parametrize("profile", [*SHIPPED, "mine"])
def test_every_setting_reaches_its_notebook_as_it_stands_in_the_file(place, monkeypatch, profile):
    """Bug: `lr: 1.0e-5` arrived as text and stopped all critics of the paper; an emoji arrived as
    two halves.
    """
    if profile == "mine":
        write_params(place, "decode-odd", "decode-raw", run="decode-odd", **ODD)
        grid = json.dumps({"refusal": LOOKS})
        write_params(place, "decode-looks", "decode-raw", run="decode-looks", grid=grid)
        write_params(place, "critic-raw", "critic-raw", critics=CRITICS)
    else:
        (place / "params").symlink_to(ROOT / "params")
    monkeypatch.chdir(place)
    jobs_planned = {tuple(command) for command in planned(place, profile).values()}
    arrived = []
    for command in jobs_planned:
        if "-f" in command:
            arrived += reached(command, monkeypatch)
    # and none of what it waits for
    arrived = [(notebook, given) for notebook, given in arrived if given["profile"] == profile]
    # repr tells 1 from 1.0, True and "1"
    sides = [
        sorted(repr((notebook, sorted(given.items()))) for notebook, given in side)
        for side in (arrived, shipped(place, profile))
    ]
    assert sides[0] == sides[1]
    for notebook, given in arrived:
        params = checked(cells(notebook, given))
        for name, value in given.items():
            assert repr(written(getattr(params, name))) == repr(value), name


def test_a_shard_is_told_its_number(place, monkeypatch):
    """Guards the order on the command line: what the file of all shards says must not come last."""
    (place / "params").symlink_to(ROOT / "params")
    monkeypatch.chdir(place)
    walk = planned(place, "ci", shards=2)
    commands = [walk[f"runs/ci/decode-raw.{i}-of-2/executed.ipynb"] for i in range(2)]
    shards = [reached(command, monkeypatch)[0][1] for command in commands]
    told = [(given["shard"], given["n_shards"], given["run"]) for given in shards]
    assert told == [(0, 2, "decode-raw"), (1, 2, "decode-raw")]


@pytest.mark.parametrize(("kept", "job"), [("decode-raw", "decode_raw"), ("critic-raw", "critic")])
def test_a_profile_needs_no_critic_and_a_critic_no_decoding(place, kept, job):
    """Guards profiles of one's own: only what they have is planned."""
    write_params(place, kept, kept)
    (place / "params/mine/profile.yaml").unlink()
    printed = snakemake(place, "mine", "--dry-run", "--quiet", "rules")
    counts = dict(re.findall(r"^(\w+) +(\d+)$", printed, re.M))
    assert counts[job] == "1" and not {"decode_raw", "critic"} - {job} & counts.keys()
    # without a profile.yaml a run has tables and pictures
    assert ({"tables", "figures"} <= counts.keys()) == (kept == "decode-raw")


def test_a_number_without_a_dot_is_a_number(place, monkeypatch):
    """Bug: `lr: 1e-5` in a file of one's own, which YAML 1.1 takes for text."""
    write_params(place, "critic-raw", "critic-raw", critics="{o: {features: o, lr: 1e-5}}")
    monkeypatch.chdir(place)
    (command,) = planned(place, "mine").values()
    asked = checked(cells(*reached(command, monkeypatch)[0]))
    assert asked.critics["o"]["lr"] == 1e-5


def test_runs_may_be_named_in_a_folder_that_was_walked_before(place, monkeypatch):
    """Bug: Snakemake lists a folder once, so it missed the files of jobs that were written for runs
    named on its command line after that.
    """
    monkeypatch.chdir(place)
    names = [f"decode-{letter}" for letter in "abcd"]
    for name in names:
        write_params(place, name, "decode-raw", run=name)
    (place / "runs/mine/.jobs").mkdir(parents=True)
    runs = [f"runs/mine/{name}/manifest.json" for name in names]
    printed = snakemake(place, "mine", *runs, "--dry-run", "--quiet", "rules")
    assert all(name.replace("-", "_") in printed for name in names)


@pytest.mark.parametrize("seed", ["1", "2"])  # under which the bug showed
def test_a_critic_and_what_decodes_may_be_named_together_in_a_fresh_folder(place, seed):
    """Bug: MissingInputException, by the order in which Snakemake's sets have their names: it had
    listed the folder of job files before the file of the critic was written.
    """
    (place / "params").symlink_to(ROOT / "params")
    names = ["critics/raw", "decode-raw", "decode-raw-critic", "judge/scorers"]
    order = names[int(seed) :] + names[: int(seed)]
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "rules", "--dry-run"]
    command += [f"runs/ci/{name}/manifest.json" for name in order]
    command += ["--directory", str(place), "--snakefile", str(ROOT / "Snakefile")]
    command += ["--config", "profile=ci"]
    here = os.environ | {"PYTHONHASHSEED": seed}
    found = subprocess.run(command, env=here, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for rule in ("critic ", "decode_raw ", "decode_raw_critic", "judge "):
        assert rule in found.stdout + found.stderr


# --- what runs again ------------------------------------------------------------------------------

# what reads the decoded runs of params/ci
AFTER = {"judge/scorers", "tables.ipynb", "figures.ipynb", "claims.ipynb"}


def waiting(place) -> set[str]:
    """Return what Snakemake would make of profile ci: folders of runs, and notebooks."""
    outputs = (output.removeprefix("runs/ci/") for output in planned(place, "ci"))
    return {output.removesuffix("/executed.ipynb") for output in outputs}


def finish(place):
    """Make by hand what the walk of profile ci leaves, all at one time."""
    declared = place / "summary"
    if not declared.exists():
        declared.write_text(snakemake(place, "ci", "--summary"))
    rows = [row.split("\t") for row in declared.read_text().splitlines()]
    for made in [place / row[0] for row in rows if row[0].startswith("runs/")]:
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("{}")
    for path in (place / "runs").rglob("*"):
        os.utime(path, (1e9, 1e9))


@pytest.fixture
def walked(place) -> Path:
    """A folder in which everything of profile ci has finished."""
    shutil.copytree(ROOT / "params/ci", place / "params/ci")
    os.utime(place / "params/ci/claims.yaml", (1e9, 1e9))
    finish(place)
    return place


def test_what_is_asked_otherwise_runs_again_with_what_hangs_on_it(walked):
    """Bug: settings, a critic or a file of prompts changed, and there was nothing to be done. What
    Snakemake records itself plays no part.
    """
    snakemake(walked, "ci", "--touch", "--forceall")
    assert any((walked / ".snakemake/metadata").iterdir())
    finish(walked)
    assert waiting(walked) == set()
    edit(walked / "params/ci/decode-raw.yaml", "\n", "\n# a comment\n")
    assert waiting(walked) == set()
    edit(walked / "params/ci/decode-raw.yaml", "budget: 0.2", "budget: 0.3")
    assert waiting(walked) == {"decode-raw", *AFTER}
    finish(walked)
    (walked / "runs/ci/critics/raw/manifest.json").unlink()
    assert waiting(walked) == {"critics/raw", "decode-raw-critic", "decode-raw-tokenwise", *AFTER}


def test_prompts_of_a_file_that_change_are_answered_again(place):
    """Bug: a line was added to a file of prompts, and there was nothing to be done."""
    (place / "own.txt").write_text("One.\n")
    os.utime(place / "own.txt", (1e9, 1e9))
    own, server = json.dumps(str(place / "own.txt")), '{"server": "http://x/v1", "model": "m"}'
    write_params(place, "decode-own", "decode-raw", run="decode-own", prompts=own, policy=server)
    assert set(planned(place, "mine")) == {"runs/mine/decode-own/executed.ipynb"}
    (place / "runs/mine/decode-own").mkdir()
    (place / "runs/mine/decode-own/manifest.json").write_text("{}")
    assert planned(place, "mine") == {}
    (place / "own.txt").write_text("One.\nTwo.\n")
    os.utime(place / "own.txt", (4e9, 4e9))
    assert set(planned(place, "mine")) == {"runs/mine/decode-own/executed.ipynb"}


def test_edited_claims_stop_the_walk(walked):
    """Guards claims made to fit their results: nothing starts, and a plan registers nothing."""
    claims, registered = walked / "params/ci/claims.yaml", walked / "runs/ci/claims/registered.json"
    edit(claims, "path-safe: 0.1}", "path-safe: 0.2}")
    assert waiting(walked) == {"claims.ipynb"} and not registered.exists()
    snakemake(walked, "ci", "--touch", "--forceall")
    assert registered.exists() and waiting(walked) == set()
    edit(claims, "path-safe: 0.2}", "path-safe: 0.1}")
    with pytest.raises(SystemExit, match="is not the file that was registered before its runs"):
        waiting(walked)


# --- what is read from packed records ------------------------------------------------------------


@pytest.fixture
def archived(place) -> Path:
    """A folder whose profile decodes one run of a regime again, and packed records of all runs."""
    write_params(place, "decode-raw", "decode-raw", seed="1")
    write_params(place, "regime-few", "decode-raw", run="regime-few", points="{one: {}, two: {}}")
    profile = place / "params/mine/profile.yaml"
    profile.write_text("again: '*-one'\nnotebooks: {40_tables: {}}\n")
    (place / "docs").symlink_to(ROOT / "docs")
    for run, settings in ParamFiles("mine", base=place / "params").runs().items():
        packed = place / "runs/mine" / run
        packed.mkdir(parents=True)
        (packed / "manifest.json").write_text(json.dumps({"params": settings}))
    pack("mine", place)
    shutil.rmtree(place / "runs")
    return place


def decoded(place, **config) -> set[str]:
    """Return the names of the runs that would be decoded."""
    paths = map(Path, planned(place, "mine", **config))
    return {path.parent.stem for path in paths if path.name == "executed.ipynb"}


def test_runs_that_a_profile_does_not_decode_again_are_read_from_the_records(archived):
    """Bug: half an hour of decoding, whose records are in the repository; a second walk that does
    it after all; and, where all shall be decoded, records taken for finished runs.
    """
    made = ["runs/mine/decode-raw/manifest.json", "runs/mine/regime-few-two/manifest.json"]
    assert decoded(archived) == {"regime-few-one"}
    snakemake(archived, "mine", *made)
    assert all((archived / path).with_name(UNPACKED).exists() for path in made)
    assert "Nothing to be done" in snakemake(archived, "mine", *made)
    assert decoded(archived) == {"regime-few-one"}
    every = {"decode-raw", "regime-few-one", "regime-few-two"}
    assert decoded(archived, full=1) == decoded(archived, shards=2) == every


def test_a_run_that_was_decoded_here_stays(archived):
    """Bug: records that replace what was decoded with full=1, or its manifest deleted for them."""
    assert "decode-raw" in decoded(archived, full=1)
    (archived / "runs/mine/decode-raw").mkdir()
    (archived / "runs/mine/decode-raw/manifest.json").write_text("{}")
    assert "Nothing to be done" in snakemake(archived, "mine", "runs/mine/decode-raw/manifest.json")
    assert decoded(archived) == {"regime-few-one"}


def test_a_run_that_the_archive_lacks_is_decoded(archived):
    """Bug: a run was added after the records were packed, and the walk waited for it in them."""
    known = archived / "params/mine/decode-raw.yaml"
    shutil.copy(known, known.with_name("decode-new.yaml"))
    assert decoded(archived) == {"decode-new", "regime-few-one"}


def test_a_profile_that_names_no_runs_decodes_all(archived):
    """Guards a profile of a larger policy, whose walk would decode nothing."""
    profile = archived / "params/mine/profile.yaml"
    profile.write_text("notebooks: {40_tables: {}}\n")
    assert decoded(archived) == {"decode-raw", "regime-few-one", "regime-few-two"}


# --- what stops at once ---------------------------------------------------------------------------


def everything(folder: Path) -> dict:
    """The files of a folder with content and time, without Snakemake's own."""
    every = (path for path in folder.rglob("*") if not path.is_dir())
    found = [path for path in every if ".snakemake" not in path.parts]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


@pytest.mark.parametrize(
    ("setting", "text", "sentence"),
    [
        ("run", '"decode-$(touch X)"',
         "params/mine/decode-raw.yaml: parameter run is 'decode-$(touch X)': it must match"),
        ("profile", "../../x",
         "profile of params/mine/decode-raw.yaml is '../../x'; leave it out, or set it"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_one_sentence_and_nothing_starts(place, setting, text, sentence):
    """Bug: a run's name was given to a shell, or moved the folder of all runs away; and a name was
    refused by a traceback.
    """
    write_params(place, "decode-raw", "decode-raw", **{setting: text})
    for name in ("params.json", "responses.jsonl"):
        (place / "runs/mine/decode-raw").mkdir(parents=True, exist_ok=True)
        (place / "runs/mine/decode-raw" / name).write_text("{}\n")
    before = everything(place)
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "all"]
    command += ["--directory", str(place), "--snakefile", str(ROOT / "Snakefile")]
    command += ["--config", "profile=mine"]
    stopped = subprocess.run(command, capture_output=True, text=True)
    said = (stopped.stdout + stopped.stderr).splitlines()
    assert stopped.returncode == 1 and said[-1].startswith(f"error: {sentence}")
    assert not [line for line in said if "raceback" in line or "File " in line]
    assert not [*(place / ".snakemake").glob("locks/*")]
    assert everything(place) == before


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"profil": "mine"},
         "unknown key after --config 'profil'; did you mean 'profile'? allowed"),
        ({"profile": "mime"},
         "profile 'mime' has no params/mime/decode-*.yaml or critic-*.yaml; choose"),
        ({"shard": 4},
         "unknown key after --config 'shard'; did you mean 'shards'? allowed: allow,"),
        ({"shards": "four"},
         "shards after --config is 'four'; give a number of 0 or more, such as"),
        ({"limit": -1}, "limit after --config is -1; give a number of 0 or more, such as"),
        ({"with": "none.yaml"}, "none.yaml cannot be read (No such"),
        ({"with": "list.yaml"}, "list.yaml cannot be read ("),
    ],
)  # fmt: skip
def test_what_nothing_reads_after_config_is_one_sentence(place, monkeypatch, given, sentence):
    """Bug: `--config profil=mine` planned half an hour of another profile, and `shard=4` was lost
    without a word.
    """
    (place / "params").symlink_to(ROOT / "params")
    (place / "list.yaml").write_text("[a, b]\n")
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as stopped:
        snakemake(place, given.pop("profile", "ci"), "--dry-run", "--quiet", "all", **given)
    last = str(stopped.value).splitlines()[-1]
    assert last.startswith(f"error: {sentence}") and not (place / "runs").exists()


# --- clusters -------------------------------------------------------------------------------------

SLURM = ROOT / "profiles/slurm/config.yaml"


def resources_of(place, *flags, **config) -> dict[str, dict[str, str]]:
    """Return the resources of every job of a dry run on params/ci, by rule."""
    printed = snakemake(place, "ci", *flags, "--dry-run", "--quiet", "host", **config)
    found = re.findall(r"^ *rule (\w+):$.*?^ +resources: (.*?)$", printed, re.M | re.S)
    return {rule: dict(part.split("=") for part in given.split(", ")) for rule, given in found}


def test_jobs_of_a_cluster_ask_for_what_the_profile_says(place):
    """Bug: a table that takes a GPU, a rule of the profile that the Snakefile does not have, and a
    laptop's job held back by memory that it does not need.
    """
    (place / "params").symlink_to(ROOT / "params")
    jobs_of = resources_of(place, "--profile", str(SLURM.parent), gpu=2)
    decode, tables = jobs_of["decode_raw"], jobs_of["tables"]
    assert (decode["mem_mb"], decode["runtime"], decode["gpu"]) == ("64000", "1440", "2")
    assert (tables["mem_mb"], tables["runtime"], tables.get("gpu")) == ("4000", "60", None)
    assert jobs_of["critic"]["gpu"] == "2"
    rules = yaml.safe_load(SLURM.read_text())["set-resources"].keys()
    assert rules < jobs_of.keys() | {"ablations"}
    alone = resources_of(place)
    assert {frozenset(given) for given in alone.values()} == {frozenset({"tmpdir"})}


def test_the_profile_is_one_that_the_plugin_knows():
    """Bug: a flag of another version of the plugin, which stops the walk at its first line."""
    text = SLURM.read_text()
    offered = [line[2:].partition(":")[0] for line in text.splitlines() if "# slurm-" in line]
    known = cli.get_argument_parser().format_help()
    for flag in [*yaml.safe_load(text), *offered]:
        assert re.search(rf"^ +--{flag}[ ,\n]", known, re.M), flag


# --- what Snakemake knows of a job: its file, and the digests in it -------------------------------

DECODE = ROOT / "notebooks/30_decode.ipynb"
SETTINGS = {
    "run": "decode-raw",
    "cost": "offensive-language",
    "reward": "minilm-relevance",
    "budget": 1e-5,
}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A copy of the package by whose source jobs are known."""
    yield know_code_from(monkeypatch, tmp_path)
    forget()


def asked(path: Path, kind="decode", notebook=DECODE, **changes) -> dict[str, str]:
    """Ask for the file of a job anew and return the lines of its comments by name."""
    forget()
    jobs.request(path, kind, str(notebook), SETTINGS | changes)
    lines = [
        line[2:].rpartition(": ") for line in path.read_text().splitlines() if line.startswith("# ")
    ]
    return {name: digest for name, _, digest in lines}


# --- the file of a job ----------------------------------------------------------------------------


def test_the_file_of_a_job_is_left_alone_until_its_content_changes(tmp_path, code):
    """Bug: one word in a docstring threw away hours of runs, and a changed search none."""
    path = tmp_path / "runs/x/.jobs/decode-raw.yaml"
    before = asked(path)
    os.utime(path, (1, 1))
    written = path.read_bytes()
    edit(code / "igcore/search.py", '"""', '"""Another word. ')
    # of the notebook that draws the run, not of the run
    edit(code / "igstudy/figures/style.py", "\nimport ", "\nother = 1\nimport ")
    assert asked(path) == before
    assert (path.stat().st_mtime, path.read_bytes()) == (1, written)
    edit(code / "igcore/search.py", "\nimport ", "\nother = 1 + 2\nimport ")
    after = asked(path)
    assert {name for name in after if before[name] != after[name]} == {"code of igcore"}
    assert path.stat().st_mtime > 1 and not list(path.parent.glob("*.part"))
    assert read_yaml(path) == SETTINGS


@pytest.mark.parametrize("what", ["setting", "notebook", "version"])
def test_settings_notebook_and_versions_count(tmp_path, monkeypatch, what):
    """Bug: an edited notebook, or a run under another torch, started nothing."""
    path, notebook = tmp_path / "job.yaml", tmp_path / "n.ipynb"
    notebook.write_text(
        json.dumps({"cells": [{"cell_type": "code", "source": ["x = 1"], "outputs": []}]})
    )
    asked(path, notebook=notebook)
    before = path.read_bytes()
    edit(notebook, '"outputs": []', '"outputs": ["text"]')
    asked(path, notebook=notebook)
    assert path.read_bytes() == before
    if what == "notebook":
        edit(notebook, "x = 1", "x = 2")
    if what == "version":
        monkeypatch.setattr(jobs, "versions", lambda: provenance.versions() | {"torch": "0"})
    asked(path, notebook=notebook, budget=1e-6 if what == "setting" else 1e-5)
    assert path.read_bytes() != before


def test_a_notebook_that_looks_at_runs_is_known_by_all_code(tmp_path, code):
    """Bug: a changed table or picture was never made again."""
    path = tmp_path / "job.yaml"
    before = asked(path, "figures", ROOT / "notebooks/50_figures.ipynb")
    edit(code / "igstudy/figures/style.py", "\nimport ", "\nother = 1\nimport ")
    assert asked(path, "figures", ROOT / "notebooks/50_figures.ipynb") != before


def test_two_walks_in_one_folder_are_refused(tmp_path):
    """Guards two runs of Snakemake that write into one folder; a lock that outlives a kill."""
    program = f"""
import pathlib, time
from igstudy.runs import jobs
held = jobs.lock(pathlib.Path({str(tmp_path)!r}))
print("locked", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="another Snakemake runs in .*; wait for it, or stop it"):
            jobs.lock(tmp_path)
        process.kill()
        process.wait()
    jobs.lock(tmp_path)
