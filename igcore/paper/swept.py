"""Which of our tables and pictures hold the runs of two profiles, and which profile writes them.

The Snakefile, the notebooks 40, 45 and 50 and the README read it here. From the runs of one profile
alone each of these tables would lose rows, cells or a panel. So the profile of the sweeps writes
them, when the runs of both have finished (`igcore.runs.jobs.check_finished`).
"""

MAIN = {"ablations": "small"}  # profile of sweeps -> the one whose main runs stand beside them
# of `igcore.paper.MEASURED`
TABLES = ("lambda_alpaca_beaver", "lambda_vicuna", "ndk", "latency")
PICTURE = "pareto"


def waits(profile: str, name: str) -> bool:
    """Say whether a table or picture of this profile is left to notebook 45 of a profile of sweeps.

    Every other profile than those of `MAIN` holds its own sweeps, and its notebooks 40 and 50 write
    everything.
    """
    of_two_profiles = name in {*TABLES, PICTURE}
    return of_two_profiles and profile in {*MAIN, *MAIN.values()}
