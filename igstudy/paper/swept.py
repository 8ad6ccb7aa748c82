"""Which of our tables hold the runs of two profiles, and which profile writes them.

The Snakefile and the notebooks 40 and 45 read it here. From the runs of one profile alone each of
these tables would lose rows or cells. So the profile of the sweeps writes them, when the runs of
both have finished (`igstudy.runs.jobs.check_finished`).
"""

MAIN = {"ablations": "small"}  # profile of sweeps -> the one whose main runs stand beside them
# of `igstudy.paper.MEASURED`
TABLES = ("lambda_alpaca_beaver", "lambda_vicuna", "ndk", "latency")


def waits(profile: str, name: str) -> bool:
    """Say whether a table of this profile is left to notebook 45 of a profile of sweeps.

    Every other profile than those of `MAIN` holds its own sweeps, and its notebook 40 writes
    everything.
    """
    return name in TABLES and profile in {*MAIN, *MAIN.values()}
