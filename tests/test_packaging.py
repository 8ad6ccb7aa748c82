"""Tests of what stands around the code: dependencies in two files, params, the Snakefile, the
README; and of what it takes to add a setting, a method, a scorer or a data set, as CONTRIBUTING
says: each is added to a copy of the packages, and a params file names it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from copiedcode import edit
from imaginaryruns import snakemake
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tiny import saved, tiny_model, tiny_tokenizer

import igcore
from docs.pages import BLOCK, PAGES, WRITERS
from igcore import METHODS
from igstudy.runs.critic_params import CriticParams
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.paramfiles import ParamFiles, read_recipe
from tests import caps

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BESIDE = {  # distributions that lie beside igcore
    name: tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
    for name in ("igserve", "igstudy")
}
LOCK = tomllib.loads((ROOT / "pylock.toml").read_text())["packages"]
EXTRAS = PROJECT["optional-dependencies"] | {"served": BESIDE["igserve"]["dependencies"]}
CONDA_NAMES = {"torch": "pytorch"}
UNCHANNELLED = {"sphinx-mathjax-offline"}  # which pip installs, with the package
BIOCONDA = {"snakemake", "snakemake-executor-plugin-slurm"}  # all else is on conda-forge


def requirements(*extras: str) -> list[Requirement]:
    """Return what the package and some of its extras need; an extra that is named has its own."""
    groups = [PROJECT["dependencies"], *(EXTRAS[name] for name in extras)]
    needed = [Requirement(text) for group in groups for text in group]
    return [requirement for requirement in needed if requirement.name != "igcore"]


def test_environment_yml_agrees_with_pyproject():
    """Guards conda users against a dependency that was added or bounded in one file only. (No conda
    solve is tried.)
    """
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert content["channels"] == ["conda-forge", "bioconda"]
    *packages, last = content["dependencies"]
    assert last == {"pip": ["-e ./igserve", "-e ./igstudy", "-e .[docs]"]}
    conda, channels = {}, {}
    for package in packages:
        channel, _, text = package.rpartition("::")
        requirement = Requirement(text)
        conda[requirement.name] = requirement.specifier
        channels[requirement.name] = channel
    assert {name for name, channel in channels.items() if channel} == BIOCONDA
    assert conda.pop("python") == Requirement("python" + PROJECT["requires-python"]).specifier
    assert not conda.pop("pip")
    expected = {}
    for r in requirements(*EXTRAS.keys()):
        name = CONDA_NAMES.get(r.name, r.name)
        expected[name] = expected.get(name, r.specifier) & r.specifier
    expected = {name: bounds for name, bounds in expected.items() if name not in UNCHANNELLED}
    assert conda == expected


def test_all_files_name_one_version():
    """Guards a release whose parts ask for another igcore, or whose citation names another."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = {project["version"] for project in BESIDE.values()}
    assert {*versions, PROJECT["version"], cited["version"]} == {igcore.__version__}
    needed = [Requirement(text) for each in BESIDE.values() for text in each["dependencies"]]
    own = {str(each.specifier) for each in needed if each.name in ("igcore", "igserve")}
    assert own == {f"=={PROJECT['version']}"}
    released = f"\n## {cited['version']} - {cited['date-released']}\n"
    assert released in (ROOT / "CHANGELOG.md").read_text()


def test_no_guard_needs_an_exact_version():
    """Bug: a library that pins scikit-learn or a Git version cannot be installed beside others."""
    for requirement in requirements("embedded"):
        assert all(bound.operator != "==" for bound in requirement.specifier), requirement


def test_a_remedy_names_packages_that_an_index_has():
    """Bug: an error or a page says to install an extra of igcore, which no package index has, or a
    version that no extra has.
    """
    texts = [
        path.read_text()
        for room in ("igcore", "igserve", "igstudy")
        for path in (ROOT / room).rglob("*.py")
    ]
    named = re.findall(r'\bneeds\("([\w.]+)"(?:, "([^"]+)")?\)', "".join(texts))
    required = {name for r in requirements(*EXTRAS) for name in (r.name, str(r))}
    assert named and {package or module for module, package in named} <= required
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    texts += [path.read_text() for path in pages if path.name != "CHANGELOG.md"]
    assert not re.search(r"\bigcore\[[a-z]", "".join(texts))


def test_the_constraints_and_the_lock_pin_every_dependency_inside_its_bounds():
    """Guards the tested versions: a pin outside the bounds makes the install fail, a missing one
    lets it drift, and two files with two versions are two environments.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    tested = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    locked = {package["name"]: f"=={package['version']}" for package in LOCK}
    assert locked.items() <= tested.items()
    for requirement in requirements(*EXTRAS):
        version = locked[canonicalize_name(requirement.name)].removeprefix("==")
        assert version in requirement.specifier, requirement


def test_the_lock_names_files_of_the_public_index_alone():
    """Bug: a lock that was written beside a mirror or a folder has files that nobody else finds."""
    assert "torch" in {package["name"] for package in LOCK}
    for package in LOCK:
        files = [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]
        assert files and "directory" not in package and "index" not in package
        for file in files:
            assert file["url"].startswith("https://files.pythonhosted.org/packages/")
            assert len(file["hashes"]["sha256"]) == 64


def test_the_pinned_versions_install_under_the_first_python_that_is_allowed():
    """Bug: a pinned library asked for Python 3.11.5, and `make` failed under Debian's 3.11.2."""
    (first,) = SpecifierSet(PROJECT["requires-python"])
    asked = {dist.name: dist.metadata["Requires-Python"] or "" for dist in distributions()}
    late = [name for name, bounds in asked.items() if first.version not in SpecifierSet(bounds)]
    assert not late


def test_the_package_is_all_of_igcore_and_nothing_else():
    """Bug: a room without an `__init__`, or a file of data that no pattern names, is missing from
    an installed package; the benchmark, the rehearsal or the audit in it.
    """
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setup["packages"]["find"]["include"] == ["igcore*"]
    package_data = setup["package-data"]
    shipped = set()
    for room, patterns in package_data.items():
        folder = ROOT.joinpath(*room.split("."))
        shipped |= {path for pattern in patterns for path in folder.glob(pattern)}
    for path in (ROOT / "igcore").rglob("*.*"):
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} is no package"
        elif path.suffix != ".pyc":
            assert path in shipped, f"{path} is not installed"


def test_the_study_installs_each_of_its_rooms():
    """Bug: a room that only a checkout finds."""
    setup = tomllib.loads((ROOT / "igstudy/pyproject.toml").read_text())["tool"]["setuptools"]
    study = ROOT / "igstudy"
    marks = [*study.rglob("__init__.py"), *study.rglob("data/*.*")]
    rooms = {path.parent.relative_to(ROOT) for path in marks}
    assert set(setup["packages"]) == {room.as_posix().replace("/", ".") for room in rooms}


def test_every_profile_writes_its_tables_below_its_own_runs():
    """Bug: `make reproduce` wrote over 69 committed files, and `make test` after it failed."""
    for path in (ROOT / "params").glob("*/*.yaml"):
        figures = read_recipe(path).get("figures", f"runs/{path.parent.name}/figures")
        assert f"{figures}/".startswith(f"runs/{path.parent.name}/figures/"), path


def points(path):
    """Yield the checked parameters of every run of a decode file."""
    for _, given in ParamFiles(path.parent.name, base=ROOT / "params").points(path):
        yield DecodeParams(**given)


DECODED = sorted(
    path for kind in ("decode", "regime") for path in (ROOT / "params").glob(f"*/{kind}-*.yaml")
)


@pytest.mark.parametrize("path", DECODED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_params_file_is_valid_and_named_after_its_run(path):
    for params in points(path):
        assert params.profile == path.parent.name and params.run.startswith(path.stem)
        if params.critic:  # named in the params file of the notebook that trains it
            shipped = params.critic.startswith("records/networks/")
            profile, *_, run, name = Path(params.critic).parts[1:]
            assert not shipped or (ROOT / params.critic / "critic.safetensors").exists()
            trained = CriticParams(**read_recipe(ROOT / f"params/{profile}/critic-{run}.yaml"))
            assert name in trained.critics and trained.policy == params.policy


def test_the_embedded_profile_holds_both_policies_and_all_methods():
    small = [
        params for path in (ROOT / "params/small").glob("decode-*.yaml") for params in points(path)
    ]
    assert {p.policy.name for p in small} == {"smollm2-raw", "smollm2-chat"}
    for policy in {p.policy.name for p in small}:
        found = {m for p in small if p.policy.name == policy for m in p.methods}
        assert found | {"backtracking", "rejection"} == set(METHODS)  # those of params/searches
    # token by token, and with a critic: a stated part
    assert all(p.limit >= (12 if p.value or p.critic else 60) and p.split == "test" for p in small)


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_show_the_committed_tables(page):
    """Guards against numbers typed by hand: `make readme` writes them."""
    for block in BLOCK.finditer((ROOT / page).read_text()):
        start, kind, name, _ = block.groups()
        if kind in ("table", "arms", "claims", "plan", "fidelity"):
            shown = block.group()[len(start) : -len("<!-- end -->")]
            assert shown.strip() == WRITERS[kind](name, ROOT).strip()


@pytest.fixture(scope="module")
def declared(tmp_path_factory) -> set[str]:
    """Pictures and tables that the Snakefile declares for the embedded default, as `make publish`
    names them.
    """
    place = tmp_path_factory.mktemp("walk")
    for name in ("params", "notebooks"):
        (place / name).symlink_to(ROOT / name)
    names = [row.split("\t")[0] for row in snakemake(place, "small", "--summary").splitlines()]
    assert not [name for name in names if name.startswith("figures")]  # which are committed
    return {
        name.removeprefix("runs/small/") for name in names if name.startswith("runs/small/figures/")
    }


def committed(*patterns) -> set[str]:
    """Files of the repository by pattern; skip where there is none."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *patterns], capture_output=True, text=True
    )
    if found.returncode:
        pytest.skip("this is no git repository, so nothing says which files are committed")
    return set(found.stdout.splitlines())


def test_what_the_walk_leaves_is_committed(declared):
    """Guards against a README whose pictures nobody sees who has not run it."""
    files = {name for name in declared if name.endswith((".csv", ".png"))}
    assert files and files <= committed("figures")


# --- caps of code lines ---------------------------------------------------------------------------


MODULE = '''"""A docstring

of three lines."""

# a comment
def double(x):
    """Another."""
    text = """two
    lines"""
    return 2 * x, text  # the fourth
'''


def test_a_docstring_and_a_comment_are_no_code_and_a_text_is():
    """Bug: explaining code would cost lines, and a list of texts none."""
    assert caps.code_lines(MODULE) == 4


def test_a_part_above_its_cap_is_named_with_both_numbers(tmp_path):
    """Bug: a cap that never fails."""
    modules = "igcore/engine/a igcore/models/b tests/c docs/d igstudy/e igserve/f"
    for file in (f"{name}.py" for name in modules.split()):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(MODULE)
    cells = [{"cell_type": "code", "source": ["# no\n", "x = 1\n"]}]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/n.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "Snakefile").write_text("rule all:\n\n    # no\n    input: 'a'\n")
    assert caps.counts(tmp_path) == {"igcore": 8, "core": 4, "igserve": 4, "tests": 4, "joint": 23}
    (tmp_path / "pyproject.toml").write_text("[tool.igcore.caps]\nigcore = 8\njoint = 18\n")
    (sentence,) = caps.over(tmp_path)
    assert sentence.startswith("joint has 23 code lines, and may have 18; remove")


# --- what it takes to add a setting, a method, a scorer or a data set -----------------------------

SIZE = dict(
    policy="model", prompts="mild", limit=1, methods=["base"], cost="longest-sentence", reward=None,
    budget=9.0, max_new_tokens=4, block_size=4, device="cpu",
)  # fmt: skip
SCORER = """
class Letters:
    name, digest, sign, unit = "letters", "v1", "higher is worse", "letters"
    def score(self, prompts, responses, finished):
        return [len(response) for response in responses]
"""
RUN = """
import sys
from pathlib import Path
from igstudy import commands
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import decode_run
from igstudy.runs.paramfiles import read_recipe
file = Path("decode-a.yaml")
run = decode_run(DecodeParams(**read_recipe(file)), Path(sys.argv[1]))
sys.exit(commands.main(["verify", str(run.responses), "--params", str(file), "--replay", "all"]))
"""
# what is added -> the edit at each place, settings that name it, and what a line has then
ADDED = {
    "setting": (
        [("igcore/config.py", "strict: bool = False", "strict: bool = False\n    drawn: Count = 1"),
         ("igcore/methods.py", "(one_block(config), n_samples=1)",
          "(one_block(config), n_samples=config.drawn)")],
        {"drawn": 3}, {"n_samples": 3},
    ),
    "method": (
        [("igcore/methods.py", '    "backtracking": _STEPWISE,',
          '"any": Method(beams.unranked, one_block, reward=False), "backtracking": _STEPWISE,')],
        {"methods": ["any"], "n_samples": 5}, {"method": "any", "samples_drawn": 5},
    ),
    "scorer": (
        [("igcore/catalog.py", '"maximum":',
          '"letters": "igcore.models.letters:Letters", "maximum":')],
        {"cost": "letters"}, {"cost_scorer": "letters"},
    ),
    "data set": (
        [("igcore/catalog.py", '"mild":', '"greetings": lambda: ["Good day"], "mild":')],
        {"prompts": "greetings"}, {"prompts": "greetings", "prompt": "Good day"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny model, the file of a scorer, and copies of the packages."""
    folder = tmp_path_factory.mktemp("home")
    for package in ("igcore", "igserve", "igstudy"):
        shutil.copytree(ROOT / package, folder / package)
    tokenizer = tiny_tokenizer()
    saved(folder / "model", tiny_model(tokenizer), tokenizer)
    (folder / "igcore/models/letters.py").write_text(SCORER)
    return folder


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_has_one_place_and_a_setting_two(home, name):
    """Bug: a thing that is added in one place is unknown in another: to params files, to the lines
    of a run, or to `verify`.
    """
    places, named, expected = ADDED[name]
    for file, old, new in places:
        edit(home / file, old, new)
    (home / "decode-a.yaml").write_text(json.dumps(SIZE | named))
    command, here = [sys.executable, "-c", RUN, name], os.environ | {"PYTHONPATH": str(home)}
    made = subprocess.run(command, cwd=home, env=here, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    (line,) = map(json.loads, (home / f"{name}/responses.jsonl").read_text().splitlines())
    assert {key: line[key] for key in expected} == expected
