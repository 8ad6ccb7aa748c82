"""Imaginary runs of the params files, notebooks executed on them without a kernel, and Snakemake in
this process.
"""

import contextlib
import gc
import io
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import nbformat
import numpy as np
import yaml
from snakemake import cli
from synthetic import record

from igcore.methods import method_of
from igstudy.linefile import SETTINGS
from igstudy.report import statistics as metrics
from igstudy.runs.decode_params import Settings
from igstudy.runs.paramfiles import ParamFiles, defaults_of

ROOT = Path(__file__).parents[1]


def imaginary(path: Path, limit: int = 4) -> dict[str, list[dict]]:
    """Return lines for every run of a params file by run, with the settings that the search would
    have had.
    """
    profile = ParamFiles(path.parent.name, base=path.parents[1])
    runs = {}
    for run, given in profile.points(path):
        point = defaults_of("decode") | given
        config = Settings(**{name: point[name] for name in SETTINGS if name in point})
        runs[run] = [
            imagined(point, method_of(method).settings_under(config), method, k)
            for method in point["methods"]
            for k in range(limit)
        ]
    return runs


def imagined(point: dict, config: Settings, method: str, k: int) -> dict:
    rng = np.random.default_rng([k, config.n_samples, point["seed"], len(method)])
    n = config.n_samples
    failed = method_of(method).abstains and rng.random() < 0.1
    rewards, costs = rng.random(n).tolist(), (0.4 * rng.random(n)).tolist()
    safe = costs[0] <= config.budget
    status = (
        "abstained"
        if failed
        else "verified_safe"
        if safe or method_of(method).abstains
        else "unverified_unsafe"
    )
    trace = [
        {
            "block": b,
            "round": r,
            "drawn": n,
            "safe": 0 if r == 0 and failed else n - n // 3,
            "finals": n,
            "safe_finals": n // 2,
            "kl": 0.1 * r,
            "perplexity": 9.0,
        }
        for b in range(2)
        for r in range(config.rounds if failed else 1)
    ]
    settings = {name: getattr(config, name) for name in SETTINGS}
    outcome = dict(
        status=status, reward=rewards[0], cost=costs[0], peak_cost=costs[0],
        word_peak_cost=costs[0], generate_s=0.1 * n,
    )  # fmt: skip
    known = record(
        prompt_id=f"p{k}", policy=point["policy"], method=method, seed=point["seed"], **outcome
    )
    scorers = {"cost_digest": "c", "reward_digest": "r"}
    return (
        known
        | settings
        | scorers
        | {"trace": trace, "finals": [list(pair) for pair in zip(rewards, costs, strict=True)]}
    )


def workplace(folder: Path, monkeypatch) -> None:
    """Make a folder the root of runs and figures, with pictures that are files without content and
    few resamples.
    """
    (folder / "params").symlink_to(ROOT / "params")
    (folder / "notebooks").symlink_to(ROOT / "notebooks")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("gc.collect", lambda: 0)  # statsmodels asks for it at every correction
    monkeypatch.setattr(metrics, "RESAMPLES", 99)
    monkeypatch.setattr(
        "igstudy.figures.style.save", lambda fig, stem: stem.with_suffix(".png").touch()
    )


def written(folder: Path, profile: str, files: Sequence[str] | None = None) -> None:
    """Write imaginary runs of a profile's params files, all or those given, as notebook 30 leaves
    them.
    """
    names = ["regime-*" if profile == "searches" else "decode-*"] if files is None else files
    for path in sorted(
        path for name in names for path in (ROOT / "params" / profile).glob(f"{name}.yaml")
    ):
        given = yaml.safe_load(path.read_text())
        for run, found in imaginary(path).items():
            target = folder / "runs" / profile / run
            target.mkdir(parents=True)
            about = {"run": run, "critic_control": given.get("critic_control", "none")}
            (target / "params.json").write_text(json.dumps(about))
            (target / "manifest.json").write_text("{}")
            (target / "responses.jsonl").write_text(
                "".join(json.dumps(one) + "\n" for one in found)
            )


def executed(
    folder: Path, profile: str, name: str = "45_ablations", cells: Sequence[str] = ()
) -> None:
    """Run the code of a notebook in a folder, without a kernel: all of it, or the first two cells
    and those with these ids.
    """
    notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
    found = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sources = [
        cell.source for k, cell in enumerate(found) if not cells or k < 2 or cell.id in cells
    ]
    pattern = "regime-*" if profile == "searches" else "*"
    parameters = f'# Parameters\nprofile = "{profile}"\nfigures = "figures"\npattern = "{pattern}"'
    namespace = {"In": [parameters], "display": lambda shown: None}
    for source in [parameters, *sources[1:]]:
        exec("\n".join(text for text in source.splitlines() if not text.startswith("%")), namespace)


def outputs(folder: Path, profile: str) -> set[str]:
    """Return the figures and tables that the Snakefile expects, seen from the runs of a profile."""
    rows = snakemake(folder, profile, "--summary").splitlines()
    names = [row.split("\t")[0].removeprefix(f"runs/{profile}/") for row in rows]
    return {name for name in names if name.startswith("figures/")}


# --- Snakemake in the process of the tests: importing it anew for every call takes seconds --------


def snakemake(place, profile, *arguments, **config) -> str:
    """Call Snakemake in this process and return what it printed; SystemExit when it stopped with an
    error.
    """
    config = [f"{name}={value}" for name, value in ({"profile": profile} | config).items()]
    command = [*arguments, "--cores", "1", "--directory", str(place)]
    command += ["--snakefile", str(ROOT / "Snakefile")]
    out, here = io.StringIO(), Path.cwd()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # it leaves its temporary folders to the collector
        try:
            cli.main([*command, "--config", *config])
        except SystemExit as stop:
            if stop.code:
                raise SystemExit(f"{out.getvalue()}{stop.code}") from None
        finally:
            os.chdir(here)
            gc.collect()
    return out.getvalue()
