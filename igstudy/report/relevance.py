"""Whether an answer is about its prompt: their mutual information under the policy."""

import pandas as pd
import torch

from igcore.policy import Policy


def relevance(policy: Policy, lines: pd.DataFrame) -> pd.Series:
    """Return for each answer how much likelier its prompt makes it, nats per token.

    NaN for an answer without tokens.
    """
    answers = lines[lines["tokens"].map(len) > 0].drop_duplicates(["prompt_id", "response"])
    nothing = unprompted(policy)
    gained = [
        log_likelihood(policy, policy.encode(prompt), tokens)
        - log_likelihood(policy, nothing, tokens)
        for prompt, tokens in zip(answers["prompt"], answers["tokens"], strict=True)
    ]
    known = answers[["prompt_id", "response"]].assign(relevance=gained)
    joined = lines.merge(known, how="left", on=["prompt_id", "response"])
    return joined["relevance"].set_axis(lines.index)


def unprompted(policy: Policy) -> list[int]:
    """Return the token ids of an empty prompt; where there are none, an end token begins a text."""
    text = policy.template.opening(policy.tokenizer, "")
    ids = policy.tokenizer(text, add_special_tokens=policy.template.special)["input_ids"]
    return list(ids) or [min(policy.eos_ids)]


@torch.inference_mode()
def log_likelihood(policy: Policy, opening: list[int], answer: list[int]) -> float:
    """Return the mean log-probability (nats) of the tokens of an answer after its opening."""
    ids = torch.tensor([*opening, *answer], device=policy.model.device)
    logits = policy.model(ids[None]).logits[0, len(opening) - 1 : -1].float()
    return -torch.nn.functional.cross_entropy(logits, ids[len(opening) :]).item()
