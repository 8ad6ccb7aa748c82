"""One run of notebook 30: prompts decoded by several methods into a run folder. Knows the order of
work.

The unit of work is one method on one group of prompts, fixed by the parameters; so shards and
resumes never change a result.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ..beams import settings_of
from ..critic.spec import asked, check_critic
from ..engine.prepack import packed
from ..folders import Run, key, open_run, opened, root
from ..guard import decode
from ..models.policies import load_policy
from ..models.prompts import load_prompts
from ..models.registry import load_scorer
from ..policy import Policy, Prompt, groups_of
from ..progress import progress
from ..scorers import Scorer
from .decode_params import DecodeParams
from .identity import about, code_of, modules_of, prompts_digest, versions
from .networks import load_networks, network_files
from .records import record


def decode_run(params: DecodeParams, folder: Path | None = None) -> Run:
    """Decode prompts by several methods into a run folder; start it again after any stop and it
    goes on.

    Parameters
    ----------
    folder : Path, optional
        By default ``runs/<profile>/<run>`` under `root`, with the shard's number appended when
        there are several.

    Returns
    -------
    Run
        With all its lines.
    """
    import torch

    torch.set_num_threads(params.threads)
    shard = f".{params.shard}-of-{params.n_shards}" if params.n_shards > 1 else ""
    folder = folder or root() / "runs" / params.profile / f"{params.run}{shard}"
    cost, reward = load_scorer(params.cost), load_scorer(params.reward)
    prompts = load_prompts(
        params.prompts, params.split, params.limit, params.hardest, cost if params.hardest else None
    )
    policy = load_policy(params.policy, params.dtype, params.device)
    networks, weights = load_networks(params, root(), policy, cost, reward)
    for method in params.methods:
        check_critic(
            method,
            networks.get(asked(method)),
            policy,
            reward,
            cost,
            settings_of(method, params.search()),
        )
    mine = [prompt for group in groups_of(params, prompts) for prompt in group]
    identity = identity_of(params, mine, policy, cost, reward, weights)
    wanted = {(method, prompt.id) for method in params.methods for prompt in mine}
    # packed here as well as in every search, which then finds it done
    with open_run(folder, identity, wanted) as run, packed(policy.model):
        run.scorers = {scorer.name: scorer for scorer in (cost, reward)}
        decode_missing(params, run, prompts, policy, cost, reward, networks)
        files = [
            params.prompts if isinstance(params.prompts, str) else params.prompts["name"],
            *network_files(params, root()),
        ]
        run.finish(
            summary(run.lines)
            | {"opened": opened(policy, cost, reward, paths=files), "params": run.params}
        )
    return run


def identity_of(
    params: DecodeParams,
    prompts: Iterable[Prompt],
    policy: Policy,
    cost: Scorer,
    reward: Scorer,
    weights: Mapping[str, str],
) -> dict:
    """Return what the answers of a run depend on, as JSON values, by content.

    Parameters
    ----------
    prompts : iterable of Prompt
        Those that the folder answers.
    weights : mapping of str to str
        Hashes of the networks that methods ask, see `igcore.runs.networks.load_networks`.
    """
    parts = {"policy": about(policy), "cost": about(cost), "reward": about(reward)} | dict(weights)
    return asdict(params) | {
        "versions": versions(),
        "code": code_of(__name__, *modules_of(policy, cost, reward)),
        "chosen": prompts_digest(prompts),
        "parts": parts,
        "device": str(policy.model.device),
    }


def decode_missing(
    params: DecodeParams,
    run: Run,
    prompts: list[Prompt],
    policy: Policy,
    cost: Scorer,
    reward: Scorer,
    networks: Mapping | None = None,
) -> None:
    """Decode every group that the run does not hold yet, and append its responses one by one.

    `networks` holds what methods ask, see `igcore.runs.networks.load_networks`.
    """
    done = {key(line) for line in run.lines}
    work = [(method, group) for method in params.methods for group in groups_of(params, prompts)]
    if any((method, prompt.id) not in done for method, group in work for prompt in group):
        run.manifest.unlink(missing_ok=True)  # no longer the sign of success
    run.responses.touch()  # a shard without a group is complete, too
    bar = progress(sum(len(group) for _, group in work), params.run)
    for method, group in work:
        missing = [prompt.id for prompt in group if (method, prompt.id) not in done]
        # the whole group, even when some of its lines exist: its results depend on its composition
        if missing:
            for line in lines_of(params, method, group, policy, cost, reward, networks or {}):
                if line["prompt_id"] in missing:
                    run.append(line)
        bar.update(len(group))
    bar.close()


def lines_of(
    params: DecodeParams,
    method: str,
    group: Sequence[Prompt],
    policy: Policy,
    cost: Scorer,
    reward: Scorer,
    networks: Mapping,
) -> Iterator[dict]:
    """Yield the line of each prompt of a group, in their order."""
    config = params.search()
    answers = decode(
        method, policy, group, reward=reward, cost=cost, critic=networks.get(asked(method)),
        config=config, seed=params.seed,
        memory_gb=params.memory_gb,
    )  # fmt: skip
    for response in answers:
        yield record(
            response,
            method,
            policy.name,
            params.seed,
            settings_of(method, config),
            config.block_size,
            cost,
            reward,
        )


def summary(lines: Sequence[dict]) -> dict:
    """Say what came out: how many lines and near ties, seconds by part, and the statuses of each
    method.
    """
    counts: dict[str, dict[str, int]] = {}
    for line in lines:
        of = counts.setdefault(line["method"], {})
        of[line["status"]] = of.get(line["status"], 0) + 1
    return {
        "seconds": {
            name: sum(line[name] for line in lines)
            for name in ("generate_s", "cost_s", "reward_s", "critic_s")
        },
        "near_ties": sum(line["near_ties"] for line in lines),
        "lines": len(lines),
        "counts": counts,
    }
