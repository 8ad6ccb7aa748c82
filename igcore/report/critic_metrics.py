"""The columns of the tables of critics, which notebook 20 computes and writes."""

# of ``critic.csv``: how well f1 tells safe from unsafe, a row per critic and position
COLUMNS = (
    "policy features use_z position auroc auroc_low auroc_high auroc_within_prompt spearman ece "
    "parameters train_s within_low within_high n n_unsafe n_pairs accounting"
).split()
# of ``reliability.csv``: the share of safe rollouts, a row per critic, position and bin of f1
RELIABILITY = "position probability safe low high n n_prompts".split()
