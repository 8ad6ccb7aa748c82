"""A linear head on a middle layer of a language model as a cost, and the cost of harm.

The model is cut after that layer, so reading costs only the layers up to it. Each token's state is
divided by its root mean square, and the head reads their mean over the tokens of the answer, so one
pass gives the cost after every token.
"""

from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import AssetError, ParameterError
from ..files import file_digest
from ..scorers import COST, Scorer
from ..settings import Natural, settings
from . import assets
from .lm_scorer import Checkpoint, LMScorer, Pooling
from .pretrained import contents_of, one_sentence
from .templates import TextFormat

HARM_2 = Path(__file__).parent / "data/smollm2-harm-2.safetensors"


@settings(kw_only=True)
class Probe(Checkpoint):
    """A linear head on the states of a middle layer; a cost, the probability of its class.

    The scorer's name is ``probe:`` and the name of the head's file. With ``mean``, an empty answer
    costs the sigmoid of the bias.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`. A key of `igcore.models.assets.ASSETS` is the
        pinned model of that name.
    layer : int
        The decoder layer whose output is read, counted from 0.
    head : str
        A safetensors file with ``weight`` (H,) and ``bias`` (1,), see `load_head`.
    pooling : str
        See `igcore.models.lm_scorer.LMScorer`.
    text_format : str
        The text of a pair, a key of `igcore.models.templates.TEMPLATES`.
    """

    layer: Natural
    head: str
    pooling: Pooling = "mean"
    text_format: TextFormat = "human-assistant"

    @cached_property
    def folder(self) -> Path:
        """The folder with the model's files."""
        return assets.sound(self.repo)[0] if self.repo in assets.ASSETS else super().folder

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked.

        Raises
        ------
        AssetError
            When the head is no such file, or was trained for another model or other options.
        """
        path = Path(self.head).expanduser()
        model, _ = self.model()
        weight, bias, about = load_head(path, model.config.get_text_config().hidden_size)
        files = contents_of(self.folder)
        options = {"layer": self.layer, "pooling": self.pooling, "text_format": self.text_format}
        fitting = {name: [str(value)] for name, value in options.items()}
        fitting["backbone"] = [*files.values()]
        for name, values in fitting.items():
            if about.get(name, values[0]) not in values:
                raise AssetError(
                    f"head {path} was trained with {name} {about[name]}, which is not what is "
                    "given here; give that, or another head"
                )
        cut(model, self.layer)
        backbone = self.backbone(model, self.text_format)
        head = partial(_probability, weight.to(model.device), bias.to(model.device))
        kind = partial(LMScorer, pooling=self.pooling)
        name = path.stem if path == HARM_2 else f"probe:{path.stem}"
        options["head"] = file_digest(path)
        return self.made(kind, name, COST, backbone, head, options, "probability", files)


def smollm2_harm_2(device: str = "auto") -> Scorer:
    """Return the learned cost of harm: a head on SmolLM2-135M, the probability of harm.

    Raises
    ------
    AssetError
        When the model cannot be downloaded, or when a file is missing or damaged.
    """
    wanted = HARM_2.with_suffix(".sha256").read_text(encoding="utf-8").split()[0]
    found = file_digest(HARM_2) if HARM_2.is_file() else "none"
    if found != wanted:
        raise AssetError(
            f"{HARM_2} is missing or damaged: its sha256 is {found} where {wanted} is needed; "
            "install igcore again"
        )
    probe = Probe(repo="smollm2", layer=17, head=str(HARM_2), dtype="float32", device=device)
    return probe.load()


def load_head(path: Path, width: int) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Return a head's weight (H,) and bias (1,) float32, and the metadata of its file.

    The metadata may name the ``layer``, ``pooling`` and ``text_format`` that it was trained with,
    and as ``backbone`` the sha256 of a weight file of its model.

    Parameters
    ----------
    width : int
        H, the size of the model's states.

    Raises
    ------
    AssetError
        When the file cannot be read, holds other tensors, or numbers that are not finite.
    """
    with one_sentence(path), safe_open(path, "pt") as file:
        about = dict(file.metadata() or {})
        tensors = {key: file.get_tensor(key).float() for key in sorted(file.keys())}
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    wanted = {"bias": [1], "weight": [width]}
    if shapes != wanted:
        raise AssetError(
            f"head {path} holds tensors of the shapes {shapes} where {wanted} are needed; give a "
            "head that was trained on this model"
        )
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise AssetError(f"head {path} holds numbers that are not finite; train it again")
    return tensors["weight"], tensors["bias"], about


def cut(model: PreTrainedModel, layer: int) -> None:
    """Make a decoder return the output of a layer, each state divided by its root mean square.

    Later layers and the final norm are dropped. The mean square is raised by 1e-6.

    Raises
    ------
    ParameterError
        When the model has no such layer, or not by the names ``layers`` and ``norm``.
    """
    decoder = model.get_decoder()
    found = len(getattr(decoder, "layers", ())) if hasattr(decoder, "norm") else 0
    if layer >= found:
        raise ParameterError(
            f"layer is {layer}, counted from 0, but {type(model).__name__} has {found} layers "
            "before a norm; give a lower one, or a decoder of another family, such as Llama or Qwen"
        )
    config = model.config.get_text_config(decoder=True)
    kept = layer + 1
    del decoder.layers[kept:]
    decoder.norm = nn.RMSNorm(config.hidden_size, eps=1e-6, elementwise_affine=False)
    config.num_hidden_layers = kept
    if types := getattr(config, "layer_types", None):  # of the layers' KV caches
        config.layer_types = types[:kept]


def _probability(weight: Tensor, bias: Tensor, states: Tensor) -> Tensor:
    """Return the probabilities (R,) float64 of states (R, H)."""
    return torch.sigmoid(states.to(weight.device).double() @ weight.double() + bias.double())
