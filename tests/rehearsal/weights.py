"""Random weights, and the files in which the hub keeps weights. Knows tensors, keys and files, not
which model needs which.

Weights are drawn wide, so that attention matters: a key too many or a position too low moves every
logit.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

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
