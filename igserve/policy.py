"""Policies in a server: tokenizer and template are local, the model is behind HTTP."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from igcore import POLICIES, ParameterError, Policy, PolicyError
from igcore.catalog import found
from igcore.config import SearchConfig
from igcore.engine.sampling import Sampling
from igcore.errors import no_latents
from igcore.files import digest_of
from igcore.methods import Method
from igcore.models.policies import PolicyEntry, check_ending, eos_ids_of
from igcore.models.pretrained import contents_of, load_tokenizer
from igcore.models.templates import TextFormat, template_of
from igcore.settings import Count, Natural, Options, Seconds, settings

from .client import SERVER, Client, check_endpoint, key_in
from .engine import ServedEngine
from .server import UNLIMITED, Server, check_tokenizer, describe


@settings(kw_only=True)
class ServedOptions:
    """Where the server of a model is, and how prompts are written.

    Attributes
    ----------
    server : str
        Address, with or without ``/v1``.
    model : str
        Its name on the server.
    tokenizer : str
        A folder, a name on the hub or a key of `igcore.POLICIES`, which also sets
        template and end tokens; no weights are loaded.
    revision : str, optional
        Of the tokenizer, see `igcore.models.hub.snapshot`.
    template : str, optional
        A key of `igcore.models.templates.TEMPLATES`, by default ``chat`` where the tokenizer has
        one.
    chat_options : mapping, optional
        Further variables of the chat template, such as ``{"enable_thinking": False}``.
    api_key_env : str
        Name of the environment variable that holds the key; it begins with ``IGCORE_SERVER_``. It
        may be empty.
    timeout : float
        Seconds to wait for a reply, see `igserve.client.Client`.
    max_retries : int
        Retries, after growing pauses, before the run stops.
    at_once : int
        Requests in flight at a time.
    batch_invariant : bool
        Whether the server promises the same tokens for a seed in any batch, as vLLM does with
        ``VLLM_BATCH_INVARIANT=1``. Only then does `python -m igstudy verify --replay` decode again.
    """

    server: str
    model: str
    tokenizer: str
    revision: str | None = None
    template: TextFormat | None = None
    chat_options: Options | None = None
    api_key_env: str = f"{SERVER}KEY"
    timeout: Seconds = 120.0
    max_retries: Natural = 6
    at_once: Count = 32
    batch_invariant: bool = False


class RemoteModel:
    """Placeholder for the model of a served policy; any access raises ``PolicyError``."""

    device, dtype = torch.device("cpu"), "the server's"

    def __init__(self, name: str):
        self.name = name

    def modules(self) -> list[Any]:
        """Return no modules."""
        return []

    def __getattr__(self, name: str) -> Any:
        """Raise ``PolicyError`` for any attribute of the model."""
        if name.startswith("__"):  # Python itself looks these up
            raise AttributeError(name)
        raise PolicyError(
            f"the model of {self.name} is in a server, and this needs it locally (its {name}); "
            "load the policy from a folder or by its name"
        )


@dataclass
class ServedPolicy(Policy):
    """A policy whose model is in a server.

    It samples a retry as any block: without a penalty, as under ``diversity="none"``.

    Attributes
    ----------
    server : Server
    context : int
        Longest sequence that the server accepts, in tokens.
    served : dict
        Part of its identity: the server's version, its description of the model, and whether a run
        can be repeated. The address is left out, because another may serve the same model.
    """

    server: Any = None
    context: int = UNLIMITED
    served: dict[str, Any] = field(default_factory=dict)

    def engine(self, watch: int | None = None, sampling: Sampling | None = None) -> ServedEngine:
        """Return a new engine; `watch` is ignored, because no critic reads a server."""
        return ServedEngine(self.server, self.eos_ids, sampling)

    def check(self, name: str, method: Method, config: SearchConfig) -> None:
        """Raise ``ParameterError`` for a method, or a penalty, that a server cannot serve."""
        if method.network:
            raise no_latents(name, method.network)
        if method.search and not method.stepwise:
            raise ParameterError(
                f"method {name!r} chooses each token as it is sampled, and a server "
                "samples whole blocks; load the policy locally, or choose another method"
            )
        penalised = config.diversity == "paper" or config.diversity_penalty is not None
        if "diversity" in method.reads and penalised:
            raise ParameterError(
                f"diversity is {config.diversity!r} and diversity_penalty "
                f"{config.diversity_penalty}, but a server samples every retry from the policy "
                "itself; leave both out, or load the policy locally"
            )

    def identity(self) -> dict[str, Any]:
        """Return the inputs of the policy's answers, as far as a server reports them."""
        return super().identity() | {"served": self.served}


def load_served(options: Mapping[str, Any]) -> ServedPolicy:
    """Return the policy of a model in a server.

    Parameters
    ----------
    options : mapping
        See `ServedOptions`.

    Raises
    ------
    ParameterError
        For an unknown or invalid option, a bad address or key, and a model that the server does not
        serve.
    PolicyError
        When the server cannot be reached, or is not vLLM.
    AssetError
        When the tokenizer's files cannot be downloaded or are damaged.
    """
    given = ServedOptions(**options)
    check_endpoint("server", given.server, given.api_key_env, SERVER)
    url = given.server.rstrip("/").removesuffix("/v1")
    key = key_in(url, given.api_key_env, SERVER)
    client = Client(
        url, key, timeout=given.timeout, retries=given.max_retries, at_once=given.at_once
    )
    server = Server(client, given.model)
    known: PolicyEntry = found(POLICIES.get(given.tokenizer)) or PolicyEntry(repo=given.tokenizer)
    folder = known.folder(given.revision, weights=False)
    tokenizer = load_tokenizer(folder)
    chosen = given.template or known.template
    template = template_of(tokenizer, chosen, f"policy {given.model!r}", given.chat_options)
    entry, version = describe(server)
    server.vocabulary = 1 + max(tokenizer.get_vocab().values())
    check_tokenizer(server, tokenizer)
    served = {
        "model": given.model,
        "software": "vLLM",
        "version": version,
        "described": entry.model_dump(exclude={"id", "owned_by"}, exclude_none=True),
        "batch_invariant": given.batch_invariant,
    }
    name = f"{Path(given.model).name}@vLLM"
    policy = ServedPolicy(
        name=name,
        model=RemoteModel(name),
        tokenizer=tokenizer,
        template=template,
        eos_ids=eos_ids_of(eos_settings_of(folder), tokenizer, known.ends),
        files=contents_of(folder, weights=False),
        server=server,
        context=entry.limit or UNLIMITED,
        served=served,
    )
    check_ending(policy, str(folder))
    identity = policy.identity()
    decisive = {key: identity[key] for key in identity if key not in ("name", "digest")}
    return replace(policy, digest=digest_of(decisive))


def eos_settings_of(folder: Path) -> SimpleNamespace:
    """Return the end tokens in a folder's settings, as attributes like those of a model."""
    found = {}
    for name in ("generation_config", "config"):
        path = folder / f"{name}.json"
        # `load_tokenizer` has already parsed all JSON files
        values = json.loads(path.read_bytes()) if path.is_file() else {}
        found[name] = SimpleNamespace(eos_token_id=values.get("eos_token_id"))
    return SimpleNamespace(**found)
