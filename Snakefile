# The only orchestrator: notebooks run by papermill, from prompts to figures. On a laptop `--cores`, on a cluster Snakemake's executors.
#
#   snakemake --cores 2 --config profile=small            every params/small/decode-*.yaml, then tables and figures
#   snakemake --cores 8 --config profile=small shards=4   the same with every decode run cut into four jobs

import sys
from pathlib import Path

import yaml

PROFILE = config.get("profile", "small")
SHARDS = int(config.get("shards", 1))
FIGURES = "figures" if PROFILE == "small" else f"runs/{PROFILE}/figures"
SUFFIXES = [f".{i}-of-{SHARDS}" for i in range(SHARDS)] if SHARDS > 1 else [""]
RUNS = sorted(path.stem for path in Path("params", PROFILE).glob("decode-*.yaml"))
DONE = [f"runs/{PROFILE}/{run}{suffix}/manifest.json" for run in RUNS for suffix in SUFFIXES]
TABLES = [f"{FIGURES}/tables/{name}.{end}" for name in ("main", "comparison") for end in ("csv", "md", "tex")]
PICTURES = [f"{FIGURES}/{name}.{end}" for name in ("tradeoff", "distributions", "rates", "budget_sweep") for end in ("png", "pdf")]
TEACHING = {"start": "notebooks/00_start_here.ipynb", "theory": "notebooks/10_theory.ipynb"}
PAPERMILL = f"{sys.executable} -m papermill --no-progress-bar --stdout-file - --stderr-file - --log-level WARNING"

if not RUNS:
    raise WorkflowError(f"profile {PROFILE!r} has no params/{PROFILE}/decode-*.yaml; choose a folder of params/")


def settings(file):
    """The content of a params file: a rule runs again when it changes, not when the file is merely touched."""
    return yaml.safe_load(Path(file).read_text())


def params_of(wildcards):
    return f"params/{wildcards.profile}/{wildcards.run}.yaml"


rule all:
    input:
        TABLES + PICTURES,
        f"runs/{PROFILE}/start.ipynb",
        f"runs/{PROFILE}/theory.ipynb",


rule teach:
    input:
        notebook=lambda w: ancient(TEACHING[w.name]),
    output:
        notebook=f"runs/{PROFILE}/{{name}}.ipynb",
    wildcard_constraints:
        name="start|theory",
    shell:
        PAPERMILL + " {input.notebook} {output.notebook}"


rule decode:
    input:
        notebook=ancient("notebooks/30_decode.ipynb"),
        params=ancient(params_of),
    output:
        "runs/{profile}/{run}{suffix}/manifest.json",
    wildcard_constraints:
        run=r"decode-[^./]+",
        suffix=r"(\.\d+-of-\d+)?",
    log:
        notebook="runs/{profile}/{run}{suffix}/executed.ipynb",
    params:
        settings=lambda w: settings(params_of(w)),
        shard=lambda w: "" if not w.suffix else "-p shard {} -p n_shards {}".format(*w.suffix[1:].split("-of-")),
    threads: 1
    resources:
        gpu=1 if config.get("gpu") else 0,
    shell:
        PAPERMILL + " {input.notebook} {log.notebook} -f {input.params} {params.shard}"


rule tables:
    input:
        runs=DONE,
        notebook=ancient("notebooks/40_tables.ipynb"),
        params=ancient(f"params/{PROFILE}/tables.yaml"),
    output:
        TABLES,
    log:
        notebook=f"runs/{PROFILE}/tables.ipynb",
    params:
        settings=settings(f"params/{PROFILE}/tables.yaml"),
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
        settings=settings(f"params/{PROFILE}/figures.yaml"),
    shell:
        PAPERMILL + " {input.notebook} {log.notebook} -f {input.params}"
