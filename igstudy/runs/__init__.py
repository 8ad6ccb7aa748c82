"""Run the notebooks' experiments: validated parameters in, a folder of records out.

A run of notebook 30 passes through these steps::

    params file -> DecodeParams -> resolve -> Experiment -> decode -> record -> run folder
    paramfiles     decode_params   decode_run                decoding  records   folders

`DecodeParams` is checked data and holds names only. `resolve` loads what they name, once, and
returns an `Experiment`: prompts in groups, and a guard with models and networks for each method.
`igcore.decode` answers one group by one method, `record` turns each response into a line,
and `igstudy.runs.folders.open_run` keeps the lines under an identity (`identity`), so that a
stopped run resumes and a changed one starts again.

Notebook 20 (`critic_run`: `rollout_run`, then training) and notebook 60 (`judge_run`) keep their
folders in the same way. `verify` checks a run folder that somebody else made, and `jobs` serves
Snakemake.
"""
