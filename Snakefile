# The orchestrator: papermill runs the notebooks as jobs, from prompts to figures.
#
# On a laptop `--cores` sets how many jobs run at once; on a cluster use Snakemake's executors.
#
#   snakemake --cores 2 --config profile=small
#       the runs that the claims of params/small compare, then tables and figures of these and of all other
#       runs, which are read from records/small.tar.xz, in runs/small/figures
#   snakemake --cores 2 --config profile=small full=1
#       the same with nothing read from records: every run of params/small is made here
#   snakemake --cores 8 --config profile=small shards=4
#       the same with every job of notebook 30 cut into four
#   snakemake --cores 2 --config profile=ablations
#       the experiments of params/ablations
#   snakemake --cores 2 --config profile=ablations limit=48
#       the same on 48 prompts each, with the files' share of hardest prompts
#   snakemake --cores 2 --config profile=critic-search
#       what a critic gains where costs exist at the end only
#   snakemake --cores 2 --config profile=law
#       what an answer within budget costs: backtracking beside rejection sampling and Algorithm 1
#   snakemake --cores 2 --config profile=qwen
#       harmful prompts and harmless ones, answered by a larger policy, which is fetched by name only
#   snakemake --cores 2 --config profile=tune
#       the runs of params/tune, by which the settings of other profiles were chosen
#   snakemake --cores 2 --config profile=paper hub=/data/models
#       the paper's systems; `hub` holds models and prompt sets as <owner>/<name>
#   snakemake --cores 2 --config profile=paper with=my.yaml
#       the same with other settings, see `igstudy.runs.paramfiles`
#   snakemake --cores 2 --config profile=mine allow=mycosts
#       the same with functions of mycosts.py, which lies beside this file, see docs/runs.md
#   snakemake --profile profiles/slurm --config profile=paper shards=4 gpu=1
#       the same on a cluster, see docs/runs.md
#   docker build --tag igcore . && docker run --rm --volume "$PWD/runs:/igcore/runs" igcore
#       the first of these commands in the container of the Dockerfile

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from igcore.errors import IgcoreError
from igcore.files import file_digest
from igstudy.paper import MEASURED as PRINTED
from igstudy.paper import MAIN_PROFILES, SWEPT, is_deferred
from igstudy.runs.jobs import configured, lock, packed_runs, request, unfinished
from igstudy.runs.paramfiles import ParamFiles


@contextmanager
def one_sentence():
    """Stop with the sentence of an error that the user can fix, and without the places where it was found."""
    try:
        yield
    except IgcoreError as error:
        sys.exit(f"error: {error}")


with one_sentence():
    ALLOWED = str(config.get("allow", "")).split(",")
    FILES = ParamFiles(str(config.get("profile", "small")), configured(config), config.get("limit", 0), allow=ALLOWED)
    RUNS = FILES.runs()
PARAMS, PROFILE = FILES.folder, FILES.profile
SHARDS = config.get("shards", 0) or 1
FIGURES = f"runs/{PROFILE}/figures"  # the committed ones, in figures, are copies, see docs/compare.py
NOTEBOOKS = {
    "critic": "notebooks/20_train_critic.ipynb",
    "decode": "notebooks/30_decode.ipynb",
    "tables": "notebooks/40_tables.ipynb",
    "figures": "notebooks/50_figures.ipynb",
    "experiments": "notebooks/45_ablations.ipynb",
    "judge": "notebooks/60_judge.ipynb",
    "harm": "notebooks/65_harm.ipynb",
    "claims": "notebooks/80_claims.ipynb",
}
RUN = f"'{sys.executable}' -m igstudy run"  # papermill, with the reason of a failure in one sentence
UNPACK = f"'{sys.executable}' -m docs.records unpack"


if config.get("hub"):
    os.environ["IGCORE_HUB"] = str(config["hub"])


# claims: the runs of `tune` say what those of `small` can resolve
PILOT = PARAMS == "tune"
CLAIMS = Path("params/small" if PILOT else f"params/{PARAMS}", "claims.yaml")
with one_sentence():
    READ = set() if PILOT or SHARDS > 1 or config.get("full") else packed_runs(FILES, CLAIMS)
# in the file of a job that reads records, so that it runs again when they change
ARCHIVE = {"records": file_digest(Path(f"records/{PROFILE}.tar.xz"))} if READ else {}
DECODED = {}  # job -> its settings: a params file is one job, or two where only some of its runs are read from records
for path in FILES.decoded():
    shared = FILES.read(path)["run"]
    for run, settings in FILES.points(path):
        name = f"{path.stem}-packed" if f"{PROFILE}/{run}" in READ else path.stem
        points = DECODED.setdefault(name, {"profile": PROFILE, "run": shared, "points": {}})["points"]
        points[run.removeprefix(shared).removeprefix("-")] = settings
MADE = {name: [point["run"] for point in job["points"].values()] for name, job in DECODED.items()}
# how the folders of runs end: nothing, or the numbers of their shards
SUFFIXES = [f".{i}-of-{SHARDS}" for i in range(SHARDS)] if SHARDS > 1 else [""]
DONE = [f"runs/{PROFILE}/{run}{suffix}/manifest.json" for suffix in SUFFIXES for run in RUNS]
FOLDERS = {f"runs/{PROFILE}/{run}{suffix}": run for suffix in SUFFIXES for run in RUNS if f"{PROFILE}/{run}" not in READ}
RESCORED = [f"runs/{PROFILE}/rescored.json"] if FOLDERS else []
CRITICS = [f"runs/{PROFILE}/critics/{path.stem.removeprefix('critic-')}/manifest.json" for path in FILES.files("critic")]
WITH_CRITICS = ["critic"] if CRITICS else []
PAPER = [f"paper_{table}" for table in PRINTED if not is_deferred(PROFILE, table)]


def tables(*names):
    return expand(FIGURES + "/tables/{name}.{end}", name=names, end=["csv", "md", "json"])


def pictures(*names):
    return expand(FIGURES + "/{name}.png", name=names)


TABLES = tables("main", "compute", "comparison", *WITH_CRITICS, *PAPER, "paper_orderings")
PICTURES = pictures("tradeoff", "distributions", *WITH_CRITICS)
OF_EXPERIMENTS = {  # profile -> tables and pictures of notebook 45, see `igstudy.report.experiments`
    "ablations": ("lambda ndk strict strict_tests literal seeds compute over_refusal critic", "critic"),
    "critic-search": ("critic_search", ""),
    "law": ("law law_tests law_pooled", "law"),
    "tune": ("tune checks weights", ""),
    "paper": ("literal", ""),
}
TABULATED, DRAWN = OF_EXPERIMENTS.get(PARAMS, ("", ""))
ABLATIONS = tables(*[f"ablation_{name}" for name in TABULATED.split()]) + pictures(*[f"ablation_{name}" for name in DRAWN.split()])
MAIN, MAIN_RUNS = MAIN_PROFILES.get(PROFILE), []  # the profile beside whose runs these are the sweeps
if MAIN and not unfinished(MAIN, Path()):  # else notebook 45 says what is missing
    MAIN_RUNS = sorted(map(str, Path(f"runs/{MAIN}").glob("decode-*/manifest.json")))
    ABLATIONS += tables(*[f"paper_{table}" for table in SWEPT])
POWER = f"{'figures' if PARAMS == 'small' else FIGURES}/tables/claims_power.csv"  # of `small` the committed one
JUDGED = None if config.get("limit") else next(map(str, FILES.files("harm")), None)  # its arms have all their prompts
ENDING = FILES.read(JUDGED).get("suffix", "") if JUDGED else ""  # of tables that `small` has, too
HARM = tables(*[name + ENDING for name in ("harm", "harm_twins", "harm_judges")]) if JUDGED else []
HARM += pictures("harm_curve") if JUDGED and ENDING == "_curve" else []
HARM = tables("requests_attack") if ENDING == "_attack" else HARM
ALL_CLAIMS = ["claims", "claims_overlap", "claims_budgets", "claims_arms"]
DECIDED = tables(*(["claims_power"] if PILOT else [f"claims_arms{ENDING}"] if ENDING else ALL_CLAIMS)) if CLAIMS.is_file() else []
DECIDED += pictures("outcomes" + ENDING) if DECIDED and JUDGED and not PILOT else []
DECIDING = {"profile": PROFILE, "claims": str(CLAIMS), "harm": JUDGED, "pilot": PILOT, "figures": FIGURES}
DECIDING |= {"power_table": POWER, "suffix": ENDING}
VERDICTS = [f"runs/{PROFILE}/judge/{path.stem.removeprefix('judge-')}/manifest.json" for path in FILES.files("judge")]

if not RUNS and not CRITICS:
    sys.exit(f"error: profile {PARAMS!r} has no params/{PARAMS}/decode-*.yaml or critic-*.yaml; choose a folder of params/")


def wanted():
    """What a profile is for: its runs, tables and figures, experiments and verdicts, or critics alone."""
    # the runs are named although tables wait for them: Snakemake does not miss what lies between files that are there
    if not RUNS:
        return CRITICS
    walk = [*TABLES, *PICTURES] if FILES.files("figures") else []
    return [*DONE, *RESCORED, *CRITICS, *walk, *ABLATIONS, *VERDICTS, *HARM, *DECIDED]


def trained(folder):
    """The sign of success of the run of notebook 20 to which a folder runs/<profile>/critics/<run>[/<critic>] belongs, if it is named."""
    # without a params file to make it from, it was trained by hand and must be there
    profile, _, run = [*Path(folder or "").parts, "", "", "", ""][1:4]
    return [f"runs/{profile}/critics/{run}/manifest.json"] if critic_file(profile, run).is_file() else []


def own_files(settings):
    """The files of a user that a run reads, as prompts, a list of ids or a model's folder: it runs again when one of them changes."""
    named = [settings.get(role) for role in ("prompts", "policy", "cost", "reward")]
    values = [value for each in named for value in (each.values() if isinstance(each, dict) else [each])]
    paths = [Path(value) for value in values if value and isinstance(value, str)]
    return sorted({str(file) for path in paths for file in [path, *path.glob("*")] if file.is_file()})


def critic_file(profile, run):
    return Path("params", PARAMS if profile == PROFILE else profile, f"critic-{run}.yaml")


@one_sentence()
def job(kind, name, settings, profile=PROFILE, notebook=None):
    """The file of a job: its settings, and the digests of its code. A job runs again when it changes."""
    file = request(f"runs/{profile}/.jobs/{kind}-{name}.yaml", kind, notebook or NOTEBOOKS[kind], settings)
    workflow.iocache.exists_local[file] = True  # Snakemake lists a folder once, perhaps before this file was written
    return file


@one_sentence()
def claimed(start=False):
    """Refuse claims that were edited since they were registered; at the start, register them and say what they are."""
    from igstudy.report import claims

    file, folder = claims.load_claims(CLAIMS), Path(f"runs/{PROFILE}/claims")
    if start:
        claims.register(file, folder)
        print(f"{len(file.claims)} claims of {CLAIMS}, registered as {file.digest[:12]}", file=sys.stderr)
    elif folder.exists():
        claims.check_registered(file, folder)


wildcard_constraints:
    profile="[A-Za-z0-9_-]+",
    run="[A-Za-z0-9_-]+",


GPUS = config.get("gpu") or None  # of jobs that decode or train; profiles/slurm sets memory and time


if workflow.is_main_process:
    with one_sentence():
        lock(Path().resolve())  # freed when this process ends, also by a kill, unlike Snakemake's own
    if DECIDED and not PILOT:
        claimed()


onstart:
    if DECIDED and not PILOT:
        claimed(start=True)


rule all:
    input:
        wanted(),


rule critic:
    input:
        notebook=ancient(NOTEBOOKS["critic"]),
        job=lambda w: job("critic", w.run, FILES.read(critic_file(w.profile, w.run)) | (ARCHIVE if f"{w.profile}/critics/{w.run}" in READ else {}), w.profile),
        rollouts=lambda w: trained(FILES.read(critic_file(w.profile, w.run)).get("rollouts")),
    output:
        "runs/{profile}/critics/{run}/manifest.json",
    priority: 1  # the longest job by far, and others wait for it
    params:
        make=lambda w: UNPACK if f"{w.profile}/critics/{w.run}" in READ else f"{RUN} {NOTEBOOKS['critic']} runs/{w.profile}/critics/{w.run}/executed.ipynb -f",
    resources:
        gpu=lambda w: GPUS,
    shell:
        "{params.make} {input.job:q}"


for name, runs in MADE.items():

    rule:
        name:
            name.replace("-", "_")
        input:
            notebook=ancient(NOTEBOOKS["decode"]),
            job=lambda w, name=name: job("decode", name, DECODED[name] | (ARCHIVE if f"{PROFILE}/{MADE[name][0]}" in READ else {})),
            own=sorted({file for run in runs for file in own_files(RUNS[run])}),
            networks=sorted({made for run in runs for kind in ("critic", "value") for made in trained(RUNS[run].get(kind))}),
        output:
            [f"runs/{PROFILE}/{run}{{suffix}}/manifest.json" for run in runs],
        wildcard_constraints:
            suffix=r"(\.\d+-of-\d+)?",
        params:
            # {run} stays literal: each run has its own notebook
            make=lambda w, name=name: UNPACK if f"{PROFILE}/{MADE[name][0]}" in READ else f"{RUN} {NOTEBOOKS['decode']} 'runs/{PROFILE}/{{run}}{w.suffix}/executed.ipynb' -f",
            shard=lambda w: "" if not w.suffix else "-p shard {} -p n_shards {}".format(*w.suffix[1:].split("-of-")),
        resources:
            gpu=lambda w: GPUS,
        shell:
            "{params.make} {input.job:q} {params.shard}"


rule rescored:
    input:
        runs=[f"{folder}/manifest.json" for folder in FOLDERS],
        job=lambda w: job("rescored", "lines", {"runs": {folder: RUNS[run] for folder, run in FOLDERS.items()}}, notebook=NOTEBOOKS["decode"]),
    output:
        f"runs/{PROFILE}/rescored.json",
    resources:
        gpu=lambda w: GPUS,
    shell:
        f"'{sys.executable}' -m igstudy.runs.spotcheck {{input.job:q}} {{output:q}}"


MADE_FROM_RUNS = {  # rule -> what it makes, the executed notebook, and the file of its settings
    "tables": (TABLES, "tables", "tables"),
    "figures": (PICTURES, "figures", "figures"),
    "experiments": (ABLATIONS, "ablations", "ablations" if FILES.files("ablations") else "tables"),
    "claims": (DECIDED, "claims", ""),
    "harm": (HARM, "harm", "harm"),
}

for name, (made, executed, file) in MADE_FROM_RUNS.items():

    rule:
        name:
            name
        input:
            runs=DONE + CRITICS + VERDICTS + MAIN_RUNS + (HARM if name == "claims" else []),
            notebook=ancient(NOTEBOOKS[name]),
            claims=[] if file else CLAIMS,
            job=lambda w, name=name, file=file: job(name, name, FILES.read(f"params/{PARAMS}/{file}.yaml") if file else DECIDING),
        output:
            made or f"runs/{PROFILE}/{name}/none",
        log:
            notebook=f"runs/{PROFILE}/{executed}.ipynb",
        priority: int(name == "figures")  # the longest of what remains when all runs are done
        shell:
            RUN + " {input.notebook:q} {log.notebook:q} -f {input.job:q}"


rule judge:
    input:
        runs=DONE,
        notebook=ancient(NOTEBOOKS["judge"]),
        job=lambda w: job("judge", w.run, FILES.read(f"params/{PARAMS}/judge-{w.run}.yaml")),
    output:
        f"runs/{PROFILE}/judge/{{run}}/manifest.json",
    log:
        notebook=f"runs/{PROFILE}/judge/{{run}}/executed.ipynb",
    shell:
        RUN + " {input.notebook:q} {log.notebook:q} -f {input.job:q}"
