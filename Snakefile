# The orchestrator: papermill runs the notebooks as jobs, from prompts to figures. docs/extend.md has the commands,
# and the walk from a params file to a figure in one picture.
#
#   snakemake --cores 2 --config profile=small
#   snakemake --profile profiles/slurm --config profile=paper shards=4 gpu=1

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from igcore.errors import IgcoreError
from igstudy.runs import jobs
from igstudy.runs.paramfiles import ParamFiles, figures_of
from igstudy.runs.profiles import CLAIMS, load_profile, settings_for


@contextmanager
def one_sentence():
    """Stop with the sentence of an error that the user can fix, and without the places where it was found."""
    try:
        yield
    except IgcoreError as error:
        sys.exit(f"error: {error}")


# --- what is asked: params/<profile> has a file for each kind of run, and profile.yaml what is made of them ----------

with one_sentence():
    CHANGES, ALLOWED = jobs.configured(config), str(config.get("allow", "")).split(",")
    FILES = ParamFiles(str(config.get("profile", "small")), CHANGES, config.get("limit", 0), allow=ALLOWED)
    PROFILE, SHARDS = FILES.profile, config.get("shards", 0) or 1
    RUNS = FILES.runs()  # name -> settings
    ASKED = load_profile(FILES)
    # the runs that are read from packed records, and not made
    READ = jobs.packed_runs(FILES, ASKED) if SHARDS == 1 and not config.get("full") else set()
    DECODED = jobs.decode_jobs(FILES, READ)  # name of a job -> its settings
if not RUNS and not FILES.files("critic"):
    sys.exit(f"error: profile {FILES.folder!r} has no params/{FILES.folder}/decode-*.yaml or critic-*.yaml; choose a folder of params/")
if config.get("hub"):
    os.environ["IGCORE_HUB"] = str(config["hub"])

CRITICS = [f"runs/{PROFILE}/critics/{run}/manifest.json" for run in FILES.named("critic")]
VERDICTS = [f"runs/{PROFILE}/judge/{run}/manifest.json" for run in FILES.named("judge")]
# how the folders of runs end: nothing, or the numbers of their shards
SUFFIXES = [f".{i}-of-{SHARDS}" for i in range(SHARDS)] if SHARDS > 1 else [""]
DONE = [f"runs/{PROFILE}/{run}{suffix}/manifest.json" for suffix in SUFFIXES for run in RUNS]
# claims are about all prompts
MADE = {name: made for name, made in ASKED.made().items() if RUNS and not (name == CLAIMS and config.get("limit"))}
# the committed tables and pictures, in figures, are copies of these, see docs/compare.py
LEFT = {name: list(made.files(figures_of(PROFILE))) for name, made in MADE.items()}

DECODE, CRITIC, JUDGE = (f"notebooks/{name}.ipynb" for name in ("30_decode", "20_train_critic", "60_judge"))
RUN = f"'{sys.executable}' -m igstudy run"  # papermill, with the reason of a failure in one sentence
UNPACK = f"'{sys.executable}' -m docs.records unpack"
GPUS = config.get("gpu") or None  # of jobs that decode or train; profiles/slurm sets memory and time


@one_sentence()
def job(kind, name, settings, notebook, profile=PROFILE):
    """The file of a job: its settings, and the digests of its code. A job runs again when it changes."""
    file = jobs.request(f"runs/{profile}/.jobs/{kind}-{name}.yaml", kind, notebook, settings)
    workflow.iocache.exists_local[file] = True  # Snakemake lists a folder once, perhaps before this file was written
    return file


@one_sentence()
def claims(start=False):
    """Refuse claims that were edited since they were registered; at the start, register them and say what they are."""
    if CLAIMS in MADE and not ASKED.pilot:
        jobs.check_claims(ASKED.claims, Path(f"runs/{PROFILE}/claims"), start)


if workflow.is_main_process:
    with one_sentence():
        jobs.lock(Path().resolve())  # freed when this process ends, also by a kill, unlike Snakemake's own
    claims()


onstart:
    claims(start=True)


# --- the rules -----------------------------------------------------------------------------------------------------------


wildcard_constraints:
    profile="[A-Za-z0-9_-]+",
    run="[A-Za-z0-9_-]+",


rule all:
    # the runs are named although tables wait for them: Snakemake does not miss what lies between files that are there
    input:
        DONE,
        CRITICS,
        VERDICTS,
        *LEFT.values(),


rule critic:
    input:
        notebook=ancient(CRITIC),
        job=lambda w: job("critic", w.run, jobs.critic_settings(FILES, w.profile, w.run, READ), CRITIC, w.profile),
        rollouts=lambda w: FILES.trained(jobs.critic_settings(FILES, w.profile, w.run).get("rollouts")),
    output:
        "runs/{profile}/critics/{run}/manifest.json",
    priority: 1  # the longest job by far, and others wait for it
    params:
        make=lambda w: UNPACK if f"{w.profile}/critics/{w.run}" in READ else f"{RUN} {CRITIC} runs/{w.profile}/critics/{w.run}/executed.ipynb -f",
    resources:
        gpu=lambda w: GPUS,
    shell:
        "{params.make} {input.job:q}"


for name, settings in DECODED.items():
    points = [point["run"] for point in settings["points"].values()]

    rule:
        name:
            name.replace("-", "_")
        input:
            notebook=ancient(DECODE),
            job=lambda w, name=name: job("decode", name, DECODED[name], DECODE),
            own=sorted({file for run in points for file in jobs.own_files(RUNS[run])}),
            networks=sorted({made for run in points for kind in ("critic", "value") for made in FILES.trained(RUNS[run].get(kind))}),
        output:
            [f"runs/{PROFILE}/{run}{{suffix}}/manifest.json" for run in points],
        wildcard_constraints:
            suffix=r"(\.\d+-of-\d+)?",
        params:
            # {run} stays literal: each run has its own notebook
            make=lambda w, read="records" in settings: UNPACK if read else f"{RUN} {DECODE} 'runs/{PROFILE}/{{run}}{w.suffix}/executed.ipynb' -f",
            shard=lambda w: "" if not w.suffix else "-p shard {} -p n_shards {}".format(*w.suffix[1:].split("-of-")),
        resources:
            gpu=lambda w: GPUS,
        shell:
            "{params.make} {input.job:q} {params.shard}"


for name, made in MADE.items():
    short, book = name.partition("_")[2], f"notebooks/{name}.ipynb"

    rule:
        name:
            short
        input:
            runs=DONE + CRITICS + VERDICTS,
            beside=[str(path) for path in Path().glob(f"runs/{made.beside}/decode-*/manifest.json")],
            notebook=ancient(book),
            claims=ASKED.claims if name == CLAIMS else [],
            job=lambda w, name=name, short=short, book=book: job(short, short, settings_for(FILES, ASKED, name), book),
        output:
            LEFT[name],
        log:
            notebook=f"runs/{PROFILE}/{short}.ipynb",
        priority: int(bool(made.pictures))  # the longest of what remains when all runs are done
        shell:
            RUN + " {input.notebook:q} {log.notebook:q} -f {input.job:q}"


rule judge:
    input:
        runs=DONE,
        notebook=ancient(JUDGE),
        job=lambda w: job("judge", w.run, FILES.read(FILES.named("judge")[w.run]), JUDGE),
    output:
        f"runs/{PROFILE}/judge/{{run}}/manifest.json",
    log:
        notebook=f"runs/{PROFILE}/judge/{{run}}/executed.ipynb",
    shell:
        RUN + " {input.notebook:q} {log.notebook:q} -f {input.job:q}"
