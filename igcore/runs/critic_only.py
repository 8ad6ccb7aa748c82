"""The critic in the place of the cost model, as the only guard of a search.

Such a search is ``inferenceguard`` with cost 1 - f1 and budget 1 - threshold. Notebook 20 finds a
threshold with a certificate, see `igcore.report.certify`. To serve at it::

    alone = CriticCost(policy, critic, budget)
    decode("inferenceguard", Guard(policy, alone, reward, settings_at(threshold, config)), prompts)
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from ..config import SearchConfig
from ..critic.files import weights_file
from ..critic.latent import ENCODE, encode
from ..critic.network import Critic
from ..errors import ParameterError
from ..folders import digest_of
from ..policy import Policy
from ..scorers import COST


class CriticCost:
    """A critic as a cost: 1 - f1, the probability that the answer ends outside `budget`.

    ``ParameterError`` for a critic of another policy or budget, or of an accounting other than
    ``terminal``.
    """

    sign, unit = COST, "probability"

    def __init__(self, policy: Policy, critic: Critic, budget: float):
        """Check that the critic fits, and hash its weights, its spec and the budget."""
        spec = critic.spec
        if spec.accounting != "terminal":
            raise ParameterError(
                f"the critic was trained for accounting {spec.accounting!r}; to guard alone train "
                "one for 'terminal'"
            )
        spec.check_scorers(policy, None)
        spec.check_budget(budget)
        self.policy = policy
        self.critic = critic
        self.budget = budget
        self.name = f"critic-{spec.features}"
        weights = hashlib.sha256(weights_file(critic)).hexdigest()
        self.digest = digest_of([asdict(spec), budget, weights])

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return 1 - f1 after the last token of each text, (n,).

        NaN for an empty text and wherever the critic returns NaN. A text is tokenized again, which
        need not give the sampled tokens; z_t = d / gamma_safety^t counts the tokens that it gives.
        """
        spec = self.critic.spec
        scores = np.full(len(responses), np.nan)
        tokenizer = self.policy.tokenizer
        tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in responses]
        spoken = [i for i, ids in enumerate(tokens) if ids]
        for at in range(0, len(spoken), ENCODE):
            index = spoken[at : at + ENCODE]
            ids = [tokens[i] for i in index]
            prefixes = [self.policy.encode(prompts[i]) for i in index]
            states = encode(self.policy.model, prefixes, ids, spec.features, spec.layer)
            z = [self.budget / spec.gamma_safety ** len(own) for own in ids]
            f1, _ = self.critic.judge(states, z)
            scores[index] = 1 - f1.double().cpu().numpy()  # float32 would lose a small f1
        return scores


def settings_at(threshold: float, config: SearchConfig) -> SearchConfig:
    """Return the settings under which a `CriticCost` passes f1 >= threshold at every block end.

    Subtraction keeps the order, so every f1 that reaches the threshold passes. By rounding, an f1
    up to 2^-53 below it may pass too, where `igcore.report.certify` says "above". A certificate
    still holds, because calibration and serving use the same settings.
    """
    return replace(config, budget=1 - threshold, accounting="peak", gamma_safety=1.0, strict=False)
