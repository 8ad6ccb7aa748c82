"""Decoding with any method: what was asked for is checked, and prompts are cut into batches that
memory can hold.

Knows methods, models and settings; leaves the search to `igcore.search`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .beams import METHODS, Beam, settings_of
from .config import SearchConfig
from .critic.network import Critic
from .critic.spec import check_critic
from .engine.device import free_bytes
from .engine.memory import (
    CRITIC_ROWS,
    batch_size,
    critic_bytes,
    halving,
    search_bytes,
    session_bytes,
)
from .engine.prepack import missing_bytes, packed
from .errors import ParameterError
from .policy import Policy, Prompt, as_prompt
from .scorers import Scorer, carries, check_sign
from .search import Search
from .verdict import Response


@dataclass(frozen=True)
class Encoded(Prompt):
    """A prompt that is decoded from given token ids; its text is what scorers see.

    Attributes
    ----------
    ids : tuple of int
        At least one, and short enough for the policy's context.
    """

    ids: tuple[int, ...] = ()


def decode(
    method: str,
    policy: Policy,
    prompts: Iterable[str | Prompt],
    *,
    reward: Scorer,
    cost: Scorer,
    config: SearchConfig,
    critic: Critic | None = None,
    seed: int = 0,
    on_block: Callable[[Prompt, Sequence[Beam]], None] | None = None,
    memory_gb: float | None = None,
) -> Iterator[Response]:
    """Answer prompts with one method, in their order.

    Parameters
    ----------
    method : str
        A key of `METHODS`.
    prompts : iterable of str or Prompt
        Decoded together in groups of ``config.group_size``, in this order. The policy encodes their
        text, except for an `Encoded`.
    reward, cost : Scorer
        Reward (higher is better) and cost (higher is worse). Every method is measured by both,
        whatever it searches with.
    critic : Critic or ValueNetwork, optional
        For the methods that ask one; others leave it alone. Any object with ``watch``,
        ``reads_keys`` and ``judge`` as `igcore.critic.network.Critic` has them, or for RE-Control with
        ``steering`` as `igcore.baselines.re_control.ValueNetwork` has it. Whatever it says, a guarded method lets
        nothing out that has not passed the check of the cost model.
    seed : int
        Together with (prompt, round, beam, position) it decides every token.
    on_block : callable, optional
        Called as ``on_block(prompt, beams)`` after every block of a search that has not failed,
        with the beams kept, best first. All that follows, and the answer, continues one of them.
        Without a gate they need not be safe, and where costs are known only at the end nobody has
        looked. Not to be changed.
    memory_gb : float, optional
        Memory for keys, values and logits, in GiB; fewer prompts are decoded together where it
        would be exceeded, see `igcore.engine.memory`. By default most of what is free. Where memory runs
        out all the same, the batch is halved.

    Yields
    ------
    Response
        As each group finishes.

    Raises
    ------
    ParameterError
        Before anything is decoded: unknown method, no prompt, an empty or too long prompt, a scorer
        with the wrong sign, a method without the critic that it asks or with one trained for
        something else, too little memory for one prompt.
    ScorerError
        When a scorer fails for every text of a group.
    PolicyError
        When the policy's logits are not finite, or memory runs out for a single prompt.
    """
    settings = settings_of(method, config)
    if isinstance(prompts, str):
        raise ParameterError(
            f"prompts is the text {prompts[:40]!r}; give a list of prompts, even of one"
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ParameterError(f"seed is {seed!r}; it must be a whole number")
    check_sign(reward, "reward"), check_sign(cost, "cost")
    check_critic(method, critic, policy, reward, cost, settings)
    prompts = [as_prompt(p) for p in prompts]
    if not prompts:
        raise ParameterError("there are no prompts; give at least one")
    ids = [
        list(p.ids) if isinstance(p, Encoded) else policy.encode(p.text, config.max_new_tokens)
        for p in prompts
    ]
    length = max(map(len, ids))
    readers = {scorer.backbone.model for scorer in (reward, cost) if carries(scorer)}
    size = min(
        config.group_size, room_for(method, policy, readers, critic, settings, length, memory_gb)
    )

    def search(batch: Sequence[tuple[Prompt, list[int]]]) -> list[Response]:
        with packed(policy.model, *readers):
            return Search(
                method,
                policy,
                *zip(*batch, strict=True),
                reward,
                cost,
                critic,
                config,
                settings,
                seed,
                on_block,
            ).run()

    return halving(list(zip(prompts, ids, strict=True)), size, search)


def room_for(
    method: str,
    policy: Policy,
    readers,
    critic,
    settings: SearchConfig,
    prompt_tokens: int,
    memory_gb,
) -> int:
    """Return how many prompts fit at once, on the device that has least room for what stands on it."""
    needed = {policy.model: search_bytes(policy.model, settings, prompt_tokens, policy.cache)}
    if METHODS[method].asks_critic and critic.reads_keys:
        rows = min(CRITIC_ROWS, settings.n_samples)
        needed[policy.model] += critic_bytes(policy.model, rows, settings.max_new_tokens)
    needed |= {
        model: needed.get(model, 0) + session_bytes(model, settings, prompt_tokens)
        for model in readers
    }
    sizes = []
    for device in {model.device for model in needed}:
        here = [model for model in needed if model.device == device]
        free = free_bytes(device) - missing_bytes(*here)
        sizes.append(batch_size(sum(needed[model] for model in here), free, memory_gb))
    return min(sizes)
