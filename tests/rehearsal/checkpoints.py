"""Tiny random checkpoints in the formats of the paper's models and scorers. Knows their settings,
keys and files, runs no search.

What `build_checkpoints` writes is a mirror as `igcore.models.hub` reads it: point ``IGCORE_HUB`` at
it, and every policy and scorer loads by its own name. Sizes are tiny; keys, settings, end tokens,
types and files are those of the real ones, with their traps.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

from igcore.models.pretrained import load_tokenizer
from igcore.models.probe import GIBBERISH, HELPFUL, UNSAFE
from igcore.models.registry import load_scorer
from tests.rehearsal import configs
from tests.rehearsal.configs import FORMATS, GATE, HEADS, HIDDEN, LAYERS, OBJECTIVES, QUANTILES
from tests.rehearsal.tokenizers import LLAMA3_SIZE, llama3_folder, sentencepiece_folder, write_json
from tests.rehearsal.weights import Tensors, aimed, cast, drawn, old_keys, save, shapes_of, speak


@dataclass(frozen=True)
class Aim:
    """What a head is to say of the fixed texts of `igcore.models.probe`, so that a scorer passes
    its first look at them.

    Attributes
    ----------
    scorer : dict
        Options of `igcore.load_scorer` besides ``repo``.
    key : str
        The head's weight.
    targets : dict
        (prompt, answer) -> the number.
    """

    scorer: Mapping
    key: str
    targets: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Checkpoint:
    """How one repository is made.

    Attributes
    ----------
    weights : callable
        (folder, seed) -> tensors, after tokenizer and settings were written into the folder.
    dtype, suffix, shards
        Type and files of the weights.
    aim : Aim, optional
        For a scorer.
    """

    weights: Callable[[Path, int], Tensors]
    dtype: torch.dtype = torch.bfloat16
    suffix: str = ".safetensors"
    shards: int = 1
    aim: Aim | None = None


def build_checkpoints(folder: Path, repos: Iterable[str] | None = None) -> None:
    """Fill a mirror with tiny random checkpoints, the same every time.

    Parameters
    ----------
    folder : Path
        Gets a folder ``<owner>/<name>`` for every repository; what is there is written anew.
    repos : iterable of str, optional
        Keys of `REPOS`; by default all.
    """
    for name in REPOS if repos is None else repos:
        repo, place = REPOS[name], folder / name
        place.mkdir(parents=True, exist_ok=True)
        state = repo.weights(place, zlib.crc32(name.encode()))
        save(place, cast(state, repo.dtype), repo.suffix, repo.shards)
        if repo.aim:
            _take_aim(state, place, repo.aim)
            save(place, cast(state, repo.dtype), repo.suffix, repo.shards)


def _take_aim(state: Tensors, folder: Path, aim: Aim) -> None:
    """Change a head in place, seen from the hidden states that the scorer itself finds in its
    texts.
    """
    options = {"repo": str(folder), "dtype": "float32", "device": "cpu", "self_check": False}
    backbone = load_scorer(aim.scorer | options).backbone
    with torch.inference_mode():
        # hidden states (T, H)
        hidden = backbone.encode([backbone.ids(*text) for text in aim.targets])[:, :HIDDEN]
    head = state[aim.key]
    targets = torch.tensor(list(aim.targets.values())).float()  # (T,)
    head[:] = aimed(head, hidden, targets.expand(len(head), -1))


def _alpaca(folder: Path, seed: int) -> Tensors:
    sentencepiece_folder(folder, pad=True)
    _settings(folder, configs.LLAMA2, FORMATS["llama2_generation"])
    return _policy(folder, configs.LLAMA2, seed)


def _vicuna(folder: Path, seed: int) -> Tensors:
    sentencepiece_folder(folder, pad=False)
    _settings(folder, FORMATS["vicuna"], FORMATS["vicuna_generation"])
    return _policy(folder, FORMATS["vicuna"], seed) | old_keys(range(LAYERS), HIDDEN // HEADS)


def _llama3(folder: Path, seed: int) -> Tensors:
    llama3_folder(folder)
    _settings(folder, configs.LLAMA3, FORMATS["llama3_generation"])
    return _policy(folder, configs.LLAMA3, seed)


def _args_reward(folder: Path, seed: int) -> Tensors:
    sentencepiece_folder(folder, pad=False)
    config = configs.ARGS_REWARD
    _settings(folder, config)
    state = drawn(shapes_of(LlamaForSequenceClassification, config | {"num_labels": 1}), seed)
    return state | old_keys(range(LAYERS), HIDDEN // HEADS)


def _beaver_cost(folder: Path, seed: int) -> Tensors:
    sentencepiece_folder(folder, pad=True)
    _settings(folder, FORMATS["beaver_cost"])
    state = drawn(_backbone(FORMATS["beaver_cost"]) | {"score_head.weight": (1, HIDDEN)}, seed) | {
        "score_head.bias": torch.tensor([0.25])
    }
    normalizer = {
        "mean": torch.tensor([0.5]),
        "var": torch.tensor([2.25]),
        "count": torch.tensor([1000]),
    }
    return state | {f"normalizer.{name}": tensor for name, tensor in normalizer.items()}


def _qrm(folder: Path, seed: int) -> Tensors:
    llama3_folder(folder, LLAMA3_SIZE + 1)
    _settings(folder, configs.QRM)
    (folder / "modeling_custom.py").write_text(
        'raise RuntimeError("code that came with a checkpoint was run")\n'
    )
    state = drawn(
        _backbone(configs.QRM) | {"regression_layer.weight": (OBJECTIVES * QUANTILES, HIDDEN)}, seed
    )
    matrix = torch.eye(OBJECTIVES)
    matrix[
        configs.LABELS.index("helpsteer-verbosity"),
        [n for n, name in enumerate(configs.LABELS) if "verbosity" not in name],
    ] = -0.05
    return (
        state
        | {"reward_transform_matrix": matrix, "gating.logit_scale": torch.tensor([1.25])}
        | _gate(seed + 1)
    )


NORM = ("weight", "bias", "running_mean", "running_var")  # of a BatchNorm1d


def _gate(seed: int) -> Tensors:
    """Return three times (linear without bias, ReLU, batch norm) and a linear layer at the end."""
    sizes = [(GATE, HIDDEN), (GATE, GATE), (GATE, GATE)]
    state = drawn({f"gating.layers.{3 * n}.weight": size for n, size in enumerate(sizes)}, seed)
    norms = drawn(
        {f"gating.layers.{3 * n + 2}.{part}": (GATE,) for n in range(3) for part in NORM}, seed + 1
    )
    for key, tensor in norms.items():
        state[key] = 1 + tensor.abs() if key.endswith(("weight", "running_var")) else tensor
    state |= {f"gating.layers.{3 * n + 2}.num_batches_tracked": torch.tensor(7) for n in range(3)}
    return state | drawn(
        {"gating.layers.9.weight": (OBJECTIVES, GATE), "gating.layers.9.bias": (OBJECTIVES,)},
        seed + 2,
    )


REPOS = {
    "PKU-Alignment/alpaca-7b-reproduced": Checkpoint(_alpaca),
    "PKU-Alignment/beaver-7b-v3.0": Checkpoint(_alpaca),
    "lmsys/vicuna-7b-v1.5": Checkpoint(_vicuna, torch.float16, ".bin", 2),
    "meta-llama/Llama-3.1-8B-Instruct": Checkpoint(_llama3, shards=2),
    "argsearch/llama-7b-rm-float32": Checkpoint(
        _args_reward,
        torch.float32,
        ".bin",
        2,
        Aim({"name": "llama-7b-rm"}, "score.weight", {GIBBERISH: -1, HELPFUL: 1}),
    ),
    "PKU-Alignment/beaver-7b-unified-cost": Checkpoint(
        _beaver_cost,
        aim=Aim({"name": "beaver-7b-cost"}, "score_head.weight", {HELPFUL: -2, UNSAFE: 2}),
    ),
    "nicolinho/QRM-Llama3.1-8B": Checkpoint(
        _qrm,
        shards=2,
        aim=Aim(
            {"name": "qrm-llama-3.1-8b-cost"},
            "regression_layer.weight",
            {GIBBERISH: 0.4, HELPFUL: 0.8, UNSAFE: 0.2},
        ),
    ),
}


def _policy(folder: Path, config: Mapping, seed: int) -> Tensors:
    """Return the weights of a policy that writes letters, after its tokenizer and settings were
    written.
    """
    tokenizer = load_tokenizer(folder)
    texts = {
        i: tokenizer.decode([i], clean_up_tokenization_spaces=False)
        for text, i in tokenizer.get_vocab().items()
        if not text.startswith("<")
    }
    letters = [i for i, text in texts.items() if text.isascii() and text.isprintable()]
    state = drawn(shapes_of(LlamaForCausalLM, config), seed)
    ends = config["eos_token_id"]
    speak(state, letters, ends if isinstance(ends, list) else [ends])
    return state


def _backbone(config: Mapping) -> dict[str, tuple[int, ...]]:
    return {f"model.{key}": shape for key, shape in shapes_of(LlamaModel, config).items()}


def _settings(folder: Path, config: Mapping, generation: Mapping | None = None) -> None:
    """Write config.json and, where the model has one, generation_config.json."""
    write_json(folder / "config.json", config)
    if generation:
        write_json(
            folder / "generation_config.json",
            generation | {"transformers_version": config["transformers_version"]},
        )
