"""Show an answer during its search: text that has passed a verdict, and is never taken back."""

from collections.abc import Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from os.path import commonprefix
from queue import SimpleQueue
from threading import Event, Thread

from .beams import Beam
from .config import SearchConfig
from .decoding import PromptLike, decode
from .methods import method_of
from .prompt import Prompt
from .response import Response
from .setup import Setup
from .verdict import Emission, judge, within

LATE = (
    "method {!r} may go back behind any part of an answer, so all of it comes at its end; "
    "keep_shown=True shows each block that has passed"
)


@dataclass
class Shown:
    """The part of an answer that has passed a verdict during its search.

    The text was within budget at its end and at all checks before it. A part may still have no safe
    completion: then the answer is an abstention, and the part is all that was shown.

    Attributes
    ----------
    setup : Setup
        The guard, with its own settings: they check at least what its method checks.
    tokens : list of int
    text : str
    costs : dict of int to float
        Number of characters -> fresh cost of the text cut there, at each of its checks.
    """

    setup: Setup
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    costs: dict[int, float] = field(default_factory=dict)

    def grow(self, prompt: Prompt, beams: Sequence[Beam]) -> str:
        """Return what is new in the prefix that all kept beams share, if it passes a verdict.

        It is empty where the method or mode never abstains: nothing is certified before the end.
        """
        config, policy = self.setup.config, self.setup.policy
        if not may_abstain(self.setup):
            return ""
        tokens = certified_prefix(beams, config)
        text = policy.text(tokens)
        # what may become a stop string is no part of the answer yet
        begun = tuple(stop[:n] for stop in config.stop for n in range(1, len(stop)))
        grown = len(text) > len(self.text) and text.startswith(self.text)
        if not grown or text.endswith(begun):
            return ""
        blocks = [end for end in beams[0].ends if end < len(tokens)]
        ends = [len(policy.text(tokens[:end])) for end in blocks]
        part = Emission(text, ends=[*ends, len(text)], n_tokens=len(tokens))
        # only the new checks are scored: with all of them the calls would grow as T^2
        contract = self.setup.contracts["cost"]
        verdict = judge(contract, prompt.text, part, config, finished=False, shown=self.costs)
        if not verdict.passed:
            return ""
        self.costs |= verdict.cuts | {len(text): verdict.cost}
        new = text[len(self.text) :]
        self.tokens, self.text = tokens, text
        return new

    def rest(self, answer: Response) -> str:
        """Return what an answer adds: its rest, or the refusal if nothing has been shown."""
        whole, n = answer.judged or "", len(self.text)
        goes_on = whole.startswith(self.text) and (answer.status != "abstained" or not n)
        self.text += whole[n:] if goes_on else ""
        return self.text[n:]


def may_abstain(setup: Setup) -> bool:
    """Whether a text that fails the final check is never emitted."""
    return method_of(setup.method).abstains and setup.config.on_failure != "paper"


def shows_parts(setup: Setup) -> bool:
    """Whether the search keeps what it has shown, so that there are parts before the end."""
    steps = may_abstain(setup) and "step" in method_of(setup.method).reads
    return setup.config.keep_shown or not steps


def certified_prefix(beams: Sequence[Beam], config: SearchConfig) -> list[int]:
    """Return the tokens that all beams share, up to a block end of each.

    There are none if a beam was over budget. The end of a finished beam does not count, because the
    final check comes later.
    """
    # the peak and the state: with a signed accounting an overspent budget may recover
    if not all(beam.safe(config) and within(beam.state.peak, config) for beam in beams):
        return []
    shared: Sequence[int] = commonprefix([beam.tokens for beam in beams])
    checked = [set(beam.ends[:-1] if beam.finished else beam.ends) for beam in beams]
    ends = {n for n in set.intersection(*checked) if n <= len(shared)}
    return list(shared[: max(ends, default=0)])


def stream(guard: Setup, prompt: PromptLike, seed: int) -> Iterator[str | Response]:
    """Yield the parts of an answer as they pass, then the answer, see `igcore.Guard.stream`."""
    shown = Shown(guard)
    pieces: SimpleQueue[str | Response | BaseException] = SimpleQueue()
    closed = Event()

    def on_block(prompt: Prompt, beams: Sequence[Beam]) -> None:
        if piece := shown.grow(prompt, beams):
            pieces.put(piece)

    # it is checked here and now, and decoded in a thread: a search cannot pause inside a block
    answers = decode(
        guard.method,
        guard,
        [prompt],
        seed=seed,
        on_block=on_block,
        cancelled=lambda _: closed.is_set(),
    )

    def search() -> None:
        try:
            (answer,) = answers
            if rest := shown.rest(answer):
                pieces.put(rest)
            pieces.put(answer)
        except BaseException as error:  # the reader raises it
            pieces.put(error)

    return _read(Thread(target=copy_context().run, args=(search,)), pieces, closed)


def _read(
    thread: Thread, pieces: SimpleQueue[str | Response | BaseException], closed: Event
) -> Iterator[str | Response]:
    """Yield what a thread puts into a queue, up to an answer; end the thread when it is closed."""
    thread.start()
    try:
        while not isinstance(piece := pieces.get(), Response):
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        yield piece
    finally:
        closed.set()
        thread.join()
