"""Tiny random checkpoints in the formats of the paper's models and scorers. Knows their settings,
keys and files, runs no search.

What `build_checkpoints` writes is a mirror as `igcore.models.hub` reads it: point ``IGCORE_HUB`` at
it, and every policy and scorer loads by its own name. Sizes are tiny; keys, settings, end tokens,
types and files are those of the real ones, with their traps.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

from igcore.models.pretrained import load_tokenizer
from igcore.models.probe import GIBBERISH, HELPFUL, UNSAFE
from igcore.models.registry import load_scorer
from tests.rehearsal.tokenizers import (
    FORMATS,
    LLAMA3_SIZE,
    llama3_folder,
    sentencepiece_folder,
    write_json,
)

HIDDEN, LAYERS, HEADS = 32, 2, 4
# of QRM; the last is the width of its gate, 1024 in the real one
OBJECTIVES, QUANTILES, GATE = 19, 19, 16
END_OF_TURN = 128009

LLAMA2, LLAMA3, LABELS = FORMATS["llama2"], FORMATS["llama3"], FORMATS["labels"]
ARGS_REWARD = {key: value for key, value in LLAMA2.items() if key != "pad_token_id"}
ARGS_REWARD |= FORMATS["args_reward"]
QRM = FORMATS["qrm"] | {
    "id2label": {str(n): name for n, name in enumerate(LABELS)},
    "label2id": {name: n for n, name in enumerate(LABELS)},
}


WIDTH = 0.3  # standard deviation of a weight
LOUD = 4.0  # first coordinate of every hidden state before the last norm, see `speak`
# logits of what is hardly ever said, and of an end token, over those of letters
QUIET, ENDING = -16.0, 1.5

Tensors = dict[str, torch.Tensor]


def drawn(shapes: Mapping[str, Sequence[int]], seed: int) -> Tensors:
    """Return random tensors, float32, of the given shapes; what is called a norm is one, a bias
    zero.
    """
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for key, shape in shapes.items():
        if key.endswith("norm.weight"):
            out[key] = torch.ones(*shape)
        elif key.endswith("bias"):
            out[key] = torch.zeros(*shape)
        else:
            out[key] = WIDTH * torch.randn(*shape, generator=generator)
    return out


def shapes_of(kind, config: Mapping) -> dict[str, tuple[int, ...]]:
    """Return the keys and shapes of a transformers model; nothing is allocated.

    Parameters
    ----------
    kind
        A class such as ``LlamaForCausalLM``.
    config : mapping
        Content of ``config.json``.
    """
    with torch.device("meta"):
        model = kind(kind.config_class(**config))
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def speak(state: Tensors, letters: Sequence[int], ends: Sequence[int]) -> None:
    """Let a random policy write letters and end now and then; changes its weights in place.

    Llama's head has no bias. So the first coordinate of every hidden state is made a constant that
    no layer reads or writes, and the first column of the head is its bias.
    """
    state["model.embed_tokens.weight"][:, 0] = LOUD
    for key, tensor in state.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
        elif key.endswith("layernorm.weight"):
            tensor[0] = 0
    bias = torch.full((len(state["lm_head.weight"]),), QUIET)
    bias[list(letters)] = 0
    bias[list(ends)] = ENDING
    state["lm_head.weight"][:, 0] = bias


def aimed(rows: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the linear head nearest to a given one that gives texts the scores wanted.

    Parameters
    ----------
    rows : Tensor (K, H)
        The head.
    hidden : Tensor (T, H)
        Hidden states of fewer texts than H.
    targets : Tensor (K, T)
        What the head is to say of them.

    Returns
    -------
    Tensor (K, H)
    """
    return rows + (targets - rows @ hidden.T) @ torch.linalg.pinv(hidden.T)


def save(folder: Path, state: Tensors, suffix: str = ".safetensors", shards: int = 1) -> None:
    """Write weights as the hub keeps them: in one file, or in several with an index."""
    stem = {".safetensors": "model", ".bin": "pytorch_model"}[suffix]
    keys = list(state)
    parts = [keys[len(keys) * n // shards : len(keys) * (n + 1) // shards] for n in range(shards)]
    names = (
        [f"{stem}{suffix}"]
        if shards == 1
        else [f"{stem}-{n + 1:05}-of-{shards:05}{suffix}" for n in range(shards)]
    )
    for name, part in zip(names, parts, strict=True):
        _write(folder / name, {key: state[key].contiguous() for key in part})
    if shards > 1:
        size = sum(tensor.nbytes for tensor in state.values())
        where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / f"{stem}{suffix}.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )


def cast(state: Tensors, dtype: torch.dtype) -> Tensors:
    """Return weights in another type; counts stay whole numbers."""
    return {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in state.items()
    }


def old_keys(layers: Iterable[int], head_dim: int, base: float = 10000.0) -> Tensors:
    """Return what checkpoints of 2023 hold of rotary positions; today it is computed."""
    frequency = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    return {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": frequency.clone() for n in layers}


def _write(path: Path, part: Tensors) -> None:
    if path.suffix == ".bin":
        torch.save(part, path)
    else:
        save_file(part, path, metadata={"format": "pt"})


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
    _settings(folder, LLAMA2, FORMATS["llama2_generation"])
    return _policy(folder, LLAMA2, seed)


def _vicuna(folder: Path, seed: int) -> Tensors:
    sentencepiece_folder(folder, pad=False)
    _settings(folder, FORMATS["vicuna"], FORMATS["vicuna_generation"])
    return _policy(folder, FORMATS["vicuna"], seed) | old_keys(range(LAYERS), HIDDEN // HEADS)


def _llama3(folder: Path, seed: int) -> Tensors:
    llama3_folder(folder)
    _settings(folder, LLAMA3, FORMATS["llama3_generation"])
    return _policy(folder, LLAMA3, seed)


def _args_reward(folder: Path, seed: int) -> Tensors:
    sentencepiece_folder(folder, pad=False)
    config = ARGS_REWARD
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
    _settings(folder, QRM)
    (folder / "modeling_custom.py").write_text(
        'raise RuntimeError("code that came with a checkpoint was run")\n'
    )
    state = drawn(
        _backbone(QRM) | {"regression_layer.weight": (OBJECTIVES * QUANTILES, HIDDEN)}, seed
    )
    matrix = torch.eye(OBJECTIVES)
    matrix[
        LABELS.index("helpsteer-verbosity"),
        [n for n, name in enumerate(LABELS) if "verbosity" not in name],
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
