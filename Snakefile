# The only orchestrator: notebooks run by papermill, from prompts to figures. On a laptop `--cores`, on a cluster Snakemake's executors.
#
#   snakemake --cores 2 --config profile=small            every params/small/{critic,decode}-*.yaml, then tables and figures
#   snakemake --cores 8 --config profile=small shards=4   the same with every decode run cut into four jobs
#   snakemake --cores 2 --config profile=ablations        the experiments of params/ablations
#   snakemake --cores 2 --config profile=ablations limit=48   the same on 48 prompts each, the share of the hardest as in the file
#   snakemake --cores 2 --config profile=critic-search    what a critic gains where costs exist at the end only
#   snakemake --cores 2 --config profile=tune             the runs of params/tune, from which their settings were chosen

import itertools
import json
import sys
from pathlib import Path

import yaml

PROFILE = config.get("profile", "small")
SHARDS = int(config.get("shards", 1))
LIMIT = int(config.get("limit", 0))
FIGURES = "figures" if PROFILE in ("small", "ablations", "critic-search", "tune") else f"runs/{PROFILE}/figures"
SUFFIXES = [f".{i}-of-{SHARDS}" for i in range(SHARDS)] if SHARDS > 1 else [""]
TEACHING = {"start": "notebooks/00_start_here.ipynb", "theory": "notebooks/10_theory.ipynb"}
PAPERMILL = f"{sys.executable} -m papermill --no-progress-bar --stdout-file - --stderr-file - --log-level WARNING"


def settings(file):
    """The content of a params file: a rule runs again when it changes, not when the file is merely touched."""
    return yaml.safe_load(Path(file).read_text())


def points(file):
    """The decode runs of a params file, one for every point of its grid: run -> parameters. `limit` of the config replaces theirs."""
    given = settings(file)
    if LIMIT and given["hardest"]:  # not where a whole set is answered
        given |= {"limit": LIMIT, "hardest": round(LIMIT * given["hardest"] / given["limit"])}
    grid = given.pop("grid", {})
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values))
        run = "-".join([given["run"], *(f"{name}-{value}" for name, value in point.items())]).replace(".", "_")
        yield run, given | point | {"run": run}


RUNS = dict(point for file in sorted(Path("params", PROFILE).glob("decode-*.yaml")) for point in points(file))
DONE = [f"runs/{PROFILE}/{run}{suffix}/manifest.json" for run in RUNS for suffix in SUFFIXES]
TRAINED = sorted(path.stem.removeprefix("critic-") for path in Path("params", PROFILE).glob("critic-*.yaml"))
CRITICS = [f"runs/{PROFILE}/critics/{name}/manifest.json" for name in TRAINED]
WITH_CRITICS = ["critic"] if CRITICS else []
TABLES = [f"{FIGURES}/tables/{name}.{end}" for name in ["main", "compute", "comparison", "heldout", *WITH_CRITICS] for end in ("csv", "md", "tex")]
PICTURES = [
    f"{FIGURES}/{name}.{end}"
    for name in ["tradeoff", "distributions", "rates", "budget_sweep", *WITH_CRITICS]
    for end in ("png", "pdf")
]
EXPERIMENTS = {  # profile -> experiment -> its tables besides the main one, see `igcore.ablations`
    "ablations": {
        "lambda": ["tests"],
        "ndk": ["tests"],
        "budget": ["tests"],
        "retries": ["rounds", "tests"],
        "factorial": ["tests", "rivals"],
        "seeds": ["tests", "spread"],
        "compute": ["seconds", "tests"],
        "over_refusal": [],
        "critic": [],
    },
    "critic-search": {"critic_search": []},
    "tune": {"tune": []},
}.get(PROFILE, {})
ABLATIONS = [
    *[
        f"{FIGURES}/tables/ablation_{'_'.join([name, *suffix])}.{end}"
        for name, suffixes in EXPERIMENTS.items()
        for suffix in [[], *([suffix] for suffix in suffixes)]
        for end in ("csv", "md", "tex")
    ],
    *[f"{FIGURES}/ablation_{name}.{end}" for name in EXPERIMENTS if name not in ("over_refusal", "tune") for end in ("png", "pdf")],
]

if not RUNS and not CRITICS:
    raise WorkflowError(f"profile {PROFILE!r} has no params/{PROFILE}/decode-*.yaml or critic-*.yaml; choose a folder of params/")


def wanted():
    """What a profile is for: experiments, tables and figures, or critics alone."""
    if EXPERIMENTS:
        return ABLATIONS
    return [*TABLES, *PICTURES, f"runs/{PROFILE}/start.ipynb", f"runs/{PROFILE}/theory.ipynb"] if RUNS else CRITICS


def trained(folder):
    """The sign of success of the run of notebook 20 to which a folder runs/<profile>/critics/<run>[/<critic>] belongs, if it is named
    and there is a params file to make it from; what was trained by hand must be there."""
    profile, _, run = [*Path(folder or "").parts, "", "", "", ""][1:4]
    return [f"runs/{profile}/critics/{run}/manifest.json"] if Path(f"params/{profile}/critic-{run}.yaml").is_file() else []


rule all:
    input:
        wanted(),


rule teach:
    input:
        notebook=lambda w: ancient(TEACHING[w.name]),
    output:
        notebook=f"runs/{PROFILE}/{{name}}.ipynb",
    wildcard_constraints:
        name="start|theory",
    shell:
        PAPERMILL + " {input.notebook} {output.notebook}"


rule critic:
    input:
        notebook=ancient("notebooks/20_train_critic.ipynb"),
        rollouts=lambda w: trained(settings(f"params/{w.profile}/critic-{w.run}.yaml").get("rollouts")),
    output:
        "runs/{profile}/critics/{run}/manifest.json",
    wildcard_constraints:
        run="[^./]+",
    log:
        notebook="runs/{profile}/critics/{run}/executed.ipynb",
    params:
        settings=lambda w: json.dumps(settings(f"params/{w.profile}/critic-{w.run}.yaml")),
    priority: 1  # the longest job by far, and others wait for it
    threads: 1
    resources:
        gpu=1 if config.get("gpu") else 0,
    shell:
        PAPERMILL + " {input.notebook} {log.notebook} -y {params.settings:q}"


rule decode:
    input:
        notebook=ancient("notebooks/30_decode.ipynb"),
        networks=lambda w: sorted({made for name in ("critic", "value") for made in trained(RUNS[w.run].get(name))}),
    output:
        f"runs/{PROFILE}/{{run}}{{suffix}}/manifest.json",
    wildcard_constraints:
        run=r"decode-[^./]+",
        suffix=r"(\.\d+-of-\d+)?",
    log:
        notebook=f"runs/{PROFILE}/{{run}}{{suffix}}/executed.ipynb",
    params:
        settings=lambda w: json.dumps(RUNS[w.run]),
        shard=lambda w: "" if not w.suffix else "-p shard {} -p n_shards {}".format(*w.suffix[1:].split("-of-")),
    threads: 1
    resources:
        gpu=1 if config.get("gpu") else 0,
    shell:
        PAPERMILL + " {input.notebook} {log.notebook} -y {params.settings:q} {params.shard}"


rule tables:
    input:
        runs=DONE + CRITICS,
        notebook=ancient("notebooks/40_tables.ipynb"),
        params=ancient(f"params/{PROFILE}/tables.yaml"),
    output:
        TABLES,
    log:
        notebook=f"runs/{PROFILE}/tables.ipynb",
    params:
        settings=lambda w, input: settings(input.params),
    shell:
        PAPERMILL + " {input.notebook} {log.notebook} -f {input.params}"


rule figures:
    input:
        runs=DONE,
        tables=TABLES,
        notebook=ancient("notebooks/50_figures.ipynb"),
        params=ancient(f"params/{PROFILE}/figures.yaml"),
    output:
        PICTURES,
    log:
        notebook=f"runs/{PROFILE}/figures.ipynb",
    params:
        settings=lambda w, input: settings(input.params),
    shell:
        PAPERMILL + " {input.notebook} {log.notebook} -f {input.params}"


rule experiments:
    input:
        runs=DONE + CRITICS,
        notebook=ancient("notebooks/45_ablations.ipynb"),
        params=ancient(f"params/{PROFILE}/tables.yaml"),
    output:
        ABLATIONS,
    log:
        notebook=f"runs/{PROFILE}/ablations.ipynb",
    params:
        settings=lambda w, input: settings(input.params),
    shell:
        PAPERMILL + " {input.notebook} {log.notebook} -f {input.params}"
