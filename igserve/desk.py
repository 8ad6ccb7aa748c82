"""The desk of a server: requests wait in a queue with a bound, and one thread answers them.

Requests with equal settings that wait at the same time are decoded together. What a caller may show
comes from `igcore.streaming.Shown` alone.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from igcore import Prompt, Response, decode
from igcore.beams import Beam
from igcore.errors import ScorerWarning
from igcore.streaming import Shown

from .wire import TIME_UP, Asked

log = logging.getLogger("igserve")
News = str | Response | Exception  # a part that has passed, the answer, or why there is none


class Full(Exception):
    """No more requests may wait."""


@dataclass(eq=False)
class Ticket:
    """A request at the desk.

    Attributes
    ----------
    asked : Asked
    until : float
        When it is no longer answered, by ``time.monotonic``.
    tell : callable
        Takes the news, in the thread of the desk.
    gone : bool
        Whether the caller has left, who may set it from any thread.
    """

    asked: Asked
    until: float
    tell: Callable[[News], None]
    gone: bool = False
    shown: Shown = field(init=False)

    def __post_init__(self) -> None:
        self.shown = Shown(self.asked.guard)

    @property
    def left(self) -> bool:
        """Whether nobody waits for its answer any more."""
        return self.gone or time.monotonic() > self.until


class Desk:
    """A thread that answers requests, and those that wait for it.

    Parameters
    ----------
    waiting : int
        Most requests that may wait.
    """

    def __init__(self, waiting: int):
        self.most = waiting
        self.tickets: list[Ticket] = []
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._work, name="igserve desk", daemon=True)
        self.thread.start()

    def add(self, ticket: Ticket) -> None:
        """Let a request wait.

        Raises
        ------
        Full
            When as many wait as may.
        """
        with self.changed:
            self.tickets = [one for one in self.tickets if not one.gone]
            if len(self.tickets) >= self.most:
                raise Full
            self.tickets.append(ticket)
            self.changed.notify()

    def close(self) -> None:
        """End the thread at the next block; nobody gets an answer any more."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    def _work(self) -> None:
        while group := self._next():
            if not self._answered(group) and len(group) > 1:
                for ticket in group:  # one of them may be the reason
                    self._answered([ticket])

    def _next(self) -> list[Ticket]:
        """Take the first request and those that can be decoded with it; none when it is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.tickets or self.closed)
            if self.closed:
                return []
            first = self.tickets[0].asked
            alike = [one for one in self.tickets if one.asked.together == first.together]
            group = alike[: first.guard.config.group_size]
            self.tickets = [one for one in self.tickets if one not in group]
            return group

    def _answered(self, group: Sequence[Ticket]) -> bool:
        """Answer a group and return whether that worked; a single request gets the error."""
        try:
            with warnings.catch_warnings():  # what a scorer raises may repeat a text
                warnings.simplefilter("ignore", ScorerWarning)
                self._answer(group)
        except Exception as error:  # a scorer of the user may raise anything
            log.error("no answer to %d requests: %s", len(group), type(error).__name__)
            if len(group) == 1:
                group[0].tell(error)
            return False
        return True

    def _answer(self, group: Sequence[Ticket]) -> None:
        """Decode the requests of a group, and tell each what has passed and its answer."""
        guard = group[0].asked.guard
        # by identity: two requests may be equal
        of = {id(ticket.asked.prompt): ticket for ticket in group}

        def on_block(prompt: Prompt, beams: Sequence[Beam]) -> None:
            ticket = of[id(prompt)]
            if ticket.asked.body.stream and (part := ticket.shown.grow(prompt, beams)):
                ticket.tell(part)

        def cancelled(prompt: Prompt) -> bool:
            return self.closed or of[id(prompt)].left

        def on_answer(prompt: Prompt, answer: Response) -> None:
            ticket = of[id(prompt)]
            if answer.reason == "cancelled":
                ticket.tell(TimeoutError(TIME_UP))
                return
            if rest := ticket.shown.rest(answer):
                ticket.tell(rest)
            ticket.tell(answer)

        prompts = [ticket.asked.prompt for ticket in group]
        list(
            decode(
                guard.method,
                guard,
                prompts,
                seed=guard.seed,
                on_block=on_block,
                on_answer=on_answer,
                cancelled=cancelled,
            )
        )
