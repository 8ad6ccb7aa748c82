"""The search behind transformers' `model.generate`.

transformers prepares the inputs, and then calls ``custom_generate`` instead of its own decoding
loop. It may be a `Guard`::

    guard = igcore.Guard((model, tokenizer), cost=my_cost, budget=0.2)
    ids = model.generate(**inputs, custom_generate=guard, max_new_tokens=64, seed=1)
    guard.answers[0].status

Versions 5.17 to 5.24 do not pass on the ``streamer`` of ``generate``, so `custom_generate` takes
it.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import generation

from igcore import Guard, ParameterError, Policy, PolicyError, Prompt, Response
from igcore.beams import Beam
from igcore.decoding import PromptLike, decode
from igcore.engine.sampling import Sampling
from igcore.guard import warn_of_unread
from igcore.prompt import Encoded, as_prompt
from igcore.scorers import reads_prompts
from igcore.streaming import LATE, Shown, may_abstain, shows_parts
from igcore.template import RAW

from .arguments import check_caller, check_inputs, check_processors, check_settings

DEFAULT_LENGTH = 20  # new tokens that transformers allows by default


@dataclass
class custom_generate:
    """A guard with a streamer, for ``model.generate(**inputs, custom_generate=...)``.

    A bare `Guard` works as well. The search continues the input ids of ``generate``, without their
    left padding; scorers read their text without special tokens. The guard's config alone sets
    ``temperature``, ``top_p`` and ``top_k``: another value in the call raises ``ParameterError``,
    one that a pipeline adds is ignored with a warning. ``position_ids`` and the checkpoint's
    defaults (``top_p``, ...) are ignored.

    Parameters
    ----------
    guard : Guard
        Made of this model and its tokenizer. ``generate(seed=...)`` overrides its seed, and a
        ``max_new_tokens`` or ``max_length`` its length, unless that equals the default of the
        checkpoint, of transformers or of a pipeline. Rows of equal text are numbered: the first
        draws the samples of `decode` for that text, and each further row draws other samples.
    streamer : transformers streamer, optional
        Shows the answer to one prompt during the search.
    prompts : sequence of str, chat messages or Prompt, optional
        What scorers read, one for each row or for each row that ``num_return_sequences`` repeats. A
        pipeline passes its own. By default scorers read the text of the input ids, which holds the
        roles of a chat template, too; a warning says so where a scorer reads prompts.

    Notes
    -----
    ``generate`` returns a LongTensor (B, prompt + new): the prompts unchanged, the answers, and
    padding on the right. With ``return_dict_in_generate`` it returns a
    ``GenerateDecoderOnlyOutput`` with ``sequences``, and the `Response` of each row in its
    ``answers``. Threads that share a guard read them there: ``guard.answers`` has those of the call
    that ended last. An answer consists of the sampled tokens, and of an end token when it was
    truncated. A refusal ends with the end token and may be longer than ``max_new_tokens``; where
    not even the empty text is safe, it is that token alone. Only the ``status`` of
    ``guard.answers`` distinguishes an answer from a refusal.

    ``tokenizer.decode(new_ids, skip_special_tokens=True)`` is exactly the text that the cost model
    scored. To this end a few ids differ from the sampled ones, which ``Response.tokens`` keeps:
    bytes that form no character are written as U+FFFD, and a character cut at the end is left out,
    see `ExactPolicy.exact_ids`. The decoder of Llama 2 and similar models strips a space
    from the beginning of a text, so this text begins without one, unlike that of
    ``guard(prompt)``. Where no ids decode to the text, ``PolicyError`` is raised and nothing is
    returned. A tokenizer that cleans up spaces by default needs
    ``clean_up_tokenization_spaces=False``, there and in the streamer.

    It raises ``ParameterError`` for anything that it does not support, such as ``num_beams``,
    ``do_sample=False``, a logits processor or scores to be returned; for another model
    than the guard's; for prompts that are not padded on the left.

    The streamer receives the prompt, and after each block the tokens that all kept beams share, up
    to a block end of each. This prefix has passed a verdict: the text was within budget at its end
    and at all checks before it. While any kept beam was over budget at a check, nothing more is
    shown. A block that ends inside a character or with a line break is shown with the next one, the
    rest when the whole answer has passed the final check. With ``skip_prompt=True,
    skip_special_tokens=True`` a streamer of transformers writes exactly the text of the answer.

    Backtracking may go back behind any block, so its streamer gets the whole answer at the end, and
    a warning says so; with ``keep_shown`` it gets each block that has passed, and the search never
    goes back behind it. Rejection sampling and Best-of-N have no part to show before their end.

    A shown prefix may have no safe completion. With ``on_failure="truncate"`` the answer is then
    the last certified prefix, which continues the shown text. With ``"abstain"``, or when the final
    check disagrees, the stream stops, and the returned ids are the refusal, which is shown only if
    nothing else was. A method that never abstains, as with ``on_failure="paper"``, shows its whole
    answer at the end, with any status.
    """

    guard: Guard
    streamer: Any = None
    prompts: Sequence[PromptLike] | None = None

    def __post_init__(self) -> None:
        """Raise ``ParameterError`` unless `guard` is a guard."""
        if not isinstance(self.guard, Guard):
            raise ParameterError(f"guard is {self.guard!r:.60}; give an igcore.Guard")

    def __call__(
        self, model: Any, input_ids: torch.Tensor, seed: int | None = None, **inputs: Any
    ) -> torch.Tensor | generation.GenerateDecoderOnlyOutput:
        """Answer the rows of `input_ids` (B, L); transformers calls it."""
        try:
            shown, read = self.streamer, self.prompts
            return answer_rows(self.guard, model, input_ids, shown, read, seed=seed, **inputs)
        finally:  # the reader of a streamer waits for its end, after an error too
            if self.streamer is not None:
                self.streamer.end()


def answer_rows(
    guard: Guard,
    model: Any,
    input_ids: torch.Tensor,
    streamer: Any = None,
    prompts: Sequence[PromptLike] | None = None,
    *,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: generation.GenerationConfig,
    seed: int | None = None,
    **inputs: Any,
) -> torch.Tensor | generation.GenerateDecoderOnlyOutput:
    """Answer the rows of `input_ids` (B, L), see `custom_generate`.

    transformers chooses the names of these parameters, except `guard` and `seed`.
    """
    guard.answers.clear()
    warn_of_unread(guard)
    named, pipeline, written = check_caller(streamer)
    own = [model.generation_config, pipeline]
    if model is not guard.policy.model:
        raise ParameterError("the guard was made for another model; make one of this model")
    check_settings(generation_config, own, named, Sampling.of(guard.config))
    check_processors([*logits_processor, *stopping_criteria], generation_config)
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.long()
    check_inputs(input_ids, mask, inputs)
    if streamer is not None:
        if len(input_ids) > 1:
            raise ParameterError(
                f"a streamer shows one answer, but there are {len(input_ids)} rows; give a single "
                "prompt"
            )
        streamer.put(input_ids.cpu())

    length = _length(generation_config, own, input_ids.shape[1], guard.policy.context)
    config = replace(guard.config, max_new_tokens=length) if length else guard.config
    eos, pad = _special(generation_config, len(input_ids))
    # users and streamers decode the new ids alone, which gives no space before the text
    alone = replace(RAW, joins=False)
    policy = ExactPolicy("the model", model, guard.policy.tokenizer, alone, eos_ids=frozenset(eos))
    given = _given(prompts or written, len(input_ids), guard)
    rows = _prompts(policy, input_ids, mask, config.max_new_tokens, given)
    if streamer is not None and not shows_parts(guard):
        warnings.warn(LATE.format(guard.method), stacklevel=2)
    if may_abstain(guard):  # fails now, not at the first abstention
        policy.encoded(config.refusal)
    search_guard = replace(guard, policy=policy, config=config)
    shown = _Streamed(streamer, Shown(search_guard)) if streamer is not None else None
    on_block = shown.block if shown else None
    seed = guard.seed if seed is None else seed
    responses = list(decode(guard.method, search_guard, rows, seed=seed, on_block=on_block))
    answers = [_tokens(response, policy, eos[:1]) for response in responses]
    guard.answers[:] = responses  # last, because finding their ids may fail
    if shown:
        shown.show(answers[0])
    new = pad_sequence(
        [torch.tensor(answer, dtype=torch.long) for answer in answers],
        batch_first=True,
        padding_value=pad,
    )
    sequences = torch.cat([input_ids, new.to(input_ids)], dim=1)  # (B, L + new)
    if generation_config.return_dict_in_generate:
        output = generation.GenerateDecoderOnlyOutput(sequences=sequences)
        output.answers = responses
        return output
    return sequences


class ExactPolicy(Policy):
    """A policy whose answers have ids that decode to exactly their text."""

    def exact_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return ids whose `decoded` text is exactly the `text` of response tokens.

        They are the tokens themselves, except that bytes which form no character are replaced by
        those of U+FFFD, and a character cut at the end is left out. An end token stays the last. A
        special token inside a character of byte pieces moves in front of it.

        Raises
        ------
        PolicyError
            When no ids that the tokenizer can write decode to the text.
        """
        text, ids = self.text(tokens), self.stable_ids(tokens)
        if self.decoded(ids) != text:
            # the next token holds whole characters and a part of one: take it byte by byte
            parted = self._pieces(self._repaired(tokens)[len(ids) :][:1])
            ids = self._shortened(ids + self._ids_of_pieces("".join(parted)), text)
        if self.decoded(ids) != text:
            ids = self.encoded(text)
        end = [token for token in tokens[-1:] if token in self.eos_ids]
        # an end token that is no special token would add to the text
        return ids if ids[-1:] == end or self.decoded(ids + end) != text else ids + end

    def stable_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the part of `exact_ids` that stays with any tokens after it.

        It lacks a last token that holds whole characters and a part of the next one.
        """
        return self._shortened(self._repaired(tokens), self.text(tokens))

    def encoded(self, text: str) -> list[int]:
        """Return ids that decode to exactly a text that the policy did not write.

        Raises
        ------
        PolicyError
            When the tokenizer does not give the text back.
        """
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self.decoded(ids) != text:
            raise PolicyError(
                f"the {type(self.tokenizer).__name__} of {self.name} has no ids that decode to the "
                f"text {text[:40]!r}; call the guard itself, which returns the text, or give "
                "another refusal or tokenizer"
            )
        return ids

    def _shortened(self, ids: Sequence[int], text: str) -> list[int]:
        """Drop ids from the end until they decode to no more than a text."""
        n = len(ids)
        while len(self.decoded(ids[:n])) > len(text):
            n -= 1
        return list(ids[:n])


@dataclass
class _Streamed:
    """The ids that a streamer has got, of the part of an answer that has passed."""

    streamer: Any
    part: Shown
    tokens: list[int] = field(default_factory=list)

    def block(self, prompt: Prompt, beams: Sequence[Beam]) -> None:
        """Show what has passed after a block, as far as its ids stay and decode to it."""
        self.part.grow(prompt, beams)
        policy: Any = self.part.setup.policy  # an `ExactPolicy`
        ids = policy.stable_ids(self.part.tokens)
        # after a line break transformers' TextStreamer starts a new text, and sentencepiece strips
        # a space from the beginning of a text
        if policy.decoded(ids) == self.part.text and not self.part.text.endswith("\n"):
            self.show(ids)

    def show(self, tokens: list[int]) -> None:
        """Show the new part of `tokens`, if they continue the shown ones."""
        n = len(self.tokens)
        if len(tokens) > n and tokens[:n] == self.tokens:
            self.streamer.put(torch.tensor(tokens[n:]))
            self.tokens = tokens


def _given(prompts: Any, rows: int, guard: Guard) -> list[PromptLike | None]:
    """Return what scorers read of each row: a given prompt, or None for the text of its ids."""
    if prompts is None:
        reading = [each for each in (guard.cost, guard.reward) if each and reads_prompts(each)]
        if guard.policy.tokenizer.chat_template and reading:
            warnings.warn(
                f"{reading[0].name} reads the prompt as the text of the input ids, with the roles "
                "of a chat template, and not as the user wrote it; give what it is to read by "
                "igcore.custom_generate(guard, prompts=[...])",
                stacklevel=2,
            )
        return [None] * rows
    found = [prompts] if isinstance(prompts, str) else list(prompts)
    if not found or rows % len(found):
        raise ParameterError(
            f"prompts has {len(found)} prompts for {rows} rows of input ids; give one for each row"
        )
    return [prompt for prompt in found for _ in range(rows // len(found))]


def _prompts(
    policy: Policy,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    length: int,
    given: Sequence[PromptLike | None],
) -> list[Encoded]:
    """Return the rows of (B, L) as prompts, without their padding.

    The second and later rows of one text have a number in their id.
    """
    prompts, rows = [], Counter[str]()
    for ids, here, read in zip(input_ids, mask.bool(), given, strict=True):
        ids = tuple(ids[here].tolist())
        prompt = as_prompt(policy.text(ids) if read is None else read)
        policy.check_length(prompt.text, len(ids), length)
        number = f"-{rows[prompt.text]}" if rows[prompt.text] else ""
        rows[prompt.text] += 1
        prompts.append(Encoded(prompt.id + number, prompt.text, prompt.set_name, ids))
    return prompts


def _tokens(response: Response, policy: ExactPolicy, eos: list[int]) -> list[int]:
    """Return ids that decode to the emitted text, with an end token where the policy has none."""
    text, tokens = response.judged or "", response.tokens
    whole = policy.text(tokens) == text  # not where a stop string cut the last token
    ids = policy.exact_ids(tokens) if whole else policy.encoded(text)
    # an end token that is not special would add to the text
    return ids if response.finished or policy.decoded(ids + eos) != text else ids + eos


def _length(
    settings: generation.GenerationConfig, own: Sequence[Any], prompt: int, context: int
) -> int | None:
    """Return the number of new tokens that `generate`'s caller set, or None for a default."""
    if settings.max_new_tokens is not None:
        preset = [each.max_new_tokens for each in own]
        return settings.max_new_tokens if settings.max_new_tokens not in preset else None
    default = own[0].max_length or min(DEFAULT_LENGTH + prompt, context)
    return settings.max_length - prompt if settings.max_length != default else None


def _special(settings: generation.GenerationConfig, rows: int) -> tuple[list[int], int]:
    """Return the end tokens, and the token for padding on the right."""
    eos = settings.eos_token_id
    eos = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
    pad = settings.pad_token_id if settings.pad_token_id is not None else next(iter(eos), None)
    if pad is None and rows > 1:
        raise ParameterError(
            f"the answers to {rows} rows may need padding; give generate a pad_token_id"
        )
    return eos, pad or 0
