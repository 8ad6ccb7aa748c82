"""The plan of a profile as tables, before anything is started.

``python -m igcore.runs.plan FILE.yaml ...`` prints it. `igcore.runs.plan.needs` estimates what each
run needs.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ...errors import ParameterError
from ...report.tables import MISSING, markdown
from .estimate import DEVICES, Assumed
from .needs import KINDS, Job, Span, jobs

DEVICE = "h100-80gb"
FITTING = (
    "Prompts at a time are those that fit on 1 / 2 / ... devices with no model cut; 0 where not "
    "even one does. The parameter device of policy and scorers makes the split."
)


def _short(x: float) -> str:
    """Return a number in three digits, larger ones whole."""
    if math.isnan(x):
        return MISSING
    return f"{x:,.0f}" if abs(x) >= 100 or x == round(x) else f"{x:.3g}"


def _span(span: Span) -> str:
    """Return a range as text, one number where both ends read alike."""
    low, high = map(_short, span)
    return low if low == high else f"{low} to {high}"


def _ways(job: Job) -> str:
    """Return how many prompts fit on 1 / 2 / ... devices, as text."""
    return " / ".join(map(str, job.fit)) or MISSING


def _devices(job: Job) -> str:
    """Return the number of devices as text, "none" where no number is enough."""
    return "none" if job.fit and not any(job.fit) else _short(job.devices)


def _work(job: Job) -> dict[str, str]:
    """Return what a job does, as text by column."""
    return {
        "job": job.job,
        "policy": job.policy,
        "reward, cost": job.scorers,
        "prompts": _short(job.prompts),
        "million tokens": _span((job.tokens[0] / 1e6, job.tokens[1] / 1e6)),
        "GPU hours": _span(job.gpu_hours),
        "methods": job.methods,
    }


def _memory(job: Job) -> dict[str, str]:
    """Return what a job needs, as text by column."""
    return {
        "GiB of job": job.job,
        "policy": _short(job.policy_gib),
        "scorers": _short(job.scorers_gib),
        "keys and values": _short(job.keys_values_gib),
        "logits": _short(job.logits_gib),
        "scorer sessions": _short(job.sessions_gib),
        "critic": _short(job.critic_gib),
        "total": _short(job.total_gib),
        "prompts at a time": _ways(job),
        "devices": _devices(job),
        "split": job.split or MISSING,
    }


def aligned(frame: pd.DataFrame) -> str:
    """Return a table of text as Markdown with aligned columns."""
    rows = [list(frame.columns), *frame.to_numpy().tolist()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(frame.columns))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def how(assumed: Assumed, device: str) -> str:
    """Say in one sentence how the numbers were estimated."""
    of = assumed.device
    return (
        "Estimated by formula, not measured: a forward pass takes the longer of bytes / "
        f"{of.bandwidth / 1e12:.3g} TB/s and operations / {of.peak / 1e12:.0f} TFLOP/s ({device}; "
        f"{of.peak_float32 / 1e12:.3g} in float32), divided by an assumed efficiency of "
        f"{assumed.efficiency:g}, and at least {1000 * assumed.layer_s:g} ms a layer; prompts have "
        f"{assumed.prompt_tokens} tokens (for memory {assumed.longest_prompt}), no answer ends "
        "early, models on several devices work in turn and the hours of all devices count; a range "
        "goes from one round in every block to all rounds, and in training from the fewest epochs "
        "to all."
    )


def plan_table(files: Sequence[Path | str], assumed: Assumed) -> pd.DataFrame:
    """Return one row of text for every params file that has runs.

    Parameters
    ----------
    assumed : Assumed
        See `igcore.runs.plan.estimate.Assumed`.

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
        See `igcore.runs.plan.needs.jobs`.
    """
    rows = []
    for file in map(Path, files):
        if found := jobs([file], assumed):
            neediest = max(found, key=_need)
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            comment = first.removeprefix("#").strip() if first.startswith("#") else ""
            rows.append(
                {
                    "file": file.name,
                    "what it is": comment,
                    "jobs": str(len(found)),
                    "prompts": _short(max(job.prompts for job in found)),
                    "GiB": _short(max(job.total_gib for job in found)),
                    "GPUs": _devices(neediest),
                    "GPU hours": _span(_sum(found)),
                }
            )
    return pd.DataFrame(rows)


def plan_block(folder: Path | str, device: str = DEVICE) -> str:
    """Return the plan of a folder of params as Markdown for the README.

    The sentence on how it was estimated follows the table.
    """
    assumed = Assumed(DEVICES[device])
    table = plan_table(sorted(Path(folder).glob("*.yaml")), assumed)
    return f"{markdown(table)}\n{how(assumed, device)}"


def _need(job: Job) -> tuple:
    """Return the key that ranks jobs by what they need; one that fits nowhere needs most."""
    return not any(job.fit), job.devices, job.total_gib


def _sum(found: Sequence[Job]) -> Span:
    """Return the GPU hours of all jobs, lowest and highest."""
    return tuple(sum(job.gpu_hours[i] for job in found) for i in range(2))


def report(files: Sequence[Path | str], assumed: Assumed, device: str) -> str:
    """Return both tables, the sums, and what the plan leaves out.

    Raises
    ------
    ParameterError, AssetError
        See `igcore.runs.plan.needs.jobs`; also when no file has a run.
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
            aligned(pd.DataFrame(map(_work, found))),
            aligned(pd.DataFrame(map(_memory, found))),
            f"{len(found)} jobs, {_span(_sum(known))} GPU hours{partly}",
            how(assumed, device),
            "Memory is that of the neediest method: weights, what the engine plans for one prompt, "
            f"and the sum. {FITTING}",
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
