"""The plan of a profile as tables, before anything is started: ``python -m igcore.runs.plan FILE.yaml
...``.

Knows how to say it; what every run needs is found by `needs`, from formulas. Loads no weights.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from ...errors import ParameterError
from ...report.tables import MISSING, markdown
from .estimate import DEVICES, Assumed
from .needs import KINDS, Job, Span, jobs

DEVICE = "h100-80gb"
FITTING = (
    "Prompts at a time are those that fit on 1 / 2 / ... devices with no model cut; 0 where "
    "not even one does. The parameter "
    "device of policy and scorers makes the split."
)


def _short(x: float) -> str:
    """Return a number in three digits, larger ones whole."""
    if math.isnan(x):
        return MISSING
    return f"{x:,.0f}" if abs(x) >= 100 or x == round(x) else f"{x:.3g}"


def _span(span: Span) -> str:
    low, high = map(_short, span)
    return low if low == high else f"{low} to {high}"


def _ways(job: Job) -> str:
    return " / ".join(map(str, job.fit)) or MISSING


def _devices(job: Job) -> str:
    return "none" if job.fit and not any(job.fit) else _short(job.devices)


WORK: dict[str, Callable[[Job], str]] = {  # header -> its text
    "job": lambda job: job.job,
    "policy": lambda job: job.policy,
    "reward, cost": lambda job: job.scorers,
    "prompts": lambda job: _short(job.prompts),
    "million tokens": lambda job: _span((job.tokens[0] / 1e6, job.tokens[1] / 1e6)),
    "GPU hours": lambda job: _span(job.gpu_hours),
    "methods": lambda job: job.methods,
}
MEMORY: dict[str, Callable[[Job], str]] = {
    "GiB of job": lambda job: job.job,
    "policy": lambda job: _short(job.policy_gib),
    "scorers": lambda job: _short(job.scorers_gib),
    "keys and values": lambda job: _short(job.keys_values_gib),
    "logits": lambda job: _short(job.logits_gib),
    "scorer sessions": lambda job: _short(job.sessions_gib),
    "critic": lambda job: _short(job.critic_gib),
    "total": lambda job: _short(job.total_gib),
    "prompts at a time": _ways,
    "devices": _devices,
    "split": lambda job: job.split or MISSING,
}


def table(found: Sequence[Job], columns: dict[str, Callable[[Job], str]]) -> pd.DataFrame:
    """Return a table of jobs, as text."""
    return pd.DataFrame(
        [{name: text(job) for name, text in columns.items()} for job in found],
        columns=list(columns),
    )


def aligned(frame: pd.DataFrame) -> str:
    """Return a table of text as Markdown whose columns stand below one another."""
    rows = [list(frame.columns), *frame.to_numpy().tolist()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(frame.columns))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def how(assumed: Assumed, device: str) -> str:
    """Say in one sentence how it was estimated."""
    of = assumed.device
    return (
        f"Estimated by formula, not measured: a forward pass takes the longer of bytes / "
        f"{of.bandwidth / 1e12:.3g} TB/s and "
        f"operations / {of.peak / 1e12:.0f} TFLOP/s ({device}; {of.peak_float32 / 1e12:.3g} "
        f"in float32), divided by an assumed "
        f"efficiency of {assumed.efficiency:g}, and at least {1000 * assumed.layer_s:g} ms a "
        f"layer; prompts have "
        f"{assumed.prompt_tokens} tokens (for memory {assumed.longest_prompt}), no answer "
        f"ends early, models on several devices "
        "work in turn and the hours of all devices count; a range goes from one round in "
        "every block to all rounds, and in "
        "training from the fewest epochs to all."
    )


def plan_table(files: Sequence[Path | str], assumed: Assumed) -> pd.DataFrame:
    """Return one row of text for every params file that has runs.

    Parameters
    ----------
    assumed : Assumed
        See `igcore.estimate.Assumed`.

    Returns
    -------
    DataFrame
        ``file``, ``what it is`` (its first comment), ``jobs``, ``prompts`` of the largest job,
        ``GiB`` (weights and one prompt of the neediest method), ``GPUs`` (the fewest on which one
        prompt of every method fits, ``none`` where models would have to be cut) and ``GPU hours``
        of all jobs.

    Raises
    ------
    ParameterError, AssetError
        See `igcore.needs.jobs`.
    """
    rows = []
    for file in map(Path, files):
        if found := jobs([file], assumed):
            neediest = max(found, key=lambda job: (not any(job.fit), job.devices, job.total_gib))
            comment = file.read_text(encoding="utf-8").partition("\n")[0]
            rows.append(
                {
                    "file": file.name,
                    "what it is": comment.removeprefix("#").strip()
                    if comment.startswith("#")
                    else "",
                    "jobs": str(len(found)),
                    "prompts": _short(max(job.prompts for job in found)),
                    "GiB": _short(max(job.total_gib for job in found)),
                    "GPUs": _devices(neediest),
                    "GPU hours": _span(_sum(found)),
                }
            )
    return pd.DataFrame(rows)


def plan_block(folder: Path | str, device: str = DEVICE) -> str:
    """Return the table of a folder of params as Markdown, with the sentence on how it was
    estimated, for the README.
    """
    assumed = Assumed(DEVICES[device])
    return f"{markdown(plan_table(sorted(Path(folder).glob('*.yaml')), assumed))}\n{how(assumed, device)}"


def _sum(found: Sequence[Job]) -> Span:
    return tuple(sum(job.gpu_hours[i] for job in found) for i in range(2))


def report(files: Sequence[Path | str], assumed: Assumed, device: str) -> str:
    """Return both tables, the sums, and what the plan leaves out.

    Raises
    ------
    ParameterError, AssetError
        See `igcore.needs.jobs`; also when no file has a run.
    """
    found = jobs(files, assumed)
    if not found:
        raise ParameterError(
            f"{', '.join(map(str, files))} has no run; give files named "
            f"{' or '.join(KINDS)}-....yaml"
        )
    known = [job for job in found if not math.isnan(job.gpu_hours[0])]
    partly = f" for the {len(known)} of them that are known" if len(known) < len(found) else ""
    others = [Path(file).name for file in files if Path(file).stem.split("-")[0] not in KINDS]
    return "\n\n".join(
        [
            aligned(table(found, WORK)),
            aligned(table(found, MEMORY)),
            f"{len(found)} jobs, {_span(_sum(known))} GPU hours{partly}",
            how(assumed, device),
            f"Memory is that of the neediest method: weights, what the engine plans for one "
            f"prompt, and the sum. {FITTING}",
            *(
                f"{job.job}: n/a because nothing here says the shape of {job.unknown}."
                for job in found
                if job.unknown
            ),
            *(
                f"{job.job}: its neediest method fits on no number of devices."
                for job in found
                if _devices(job) == "none"
            ),
            *([f"Not planned: {', '.join(others)}."] if others else []),
        ]
    )
