"""A call whose prompt was compared with those before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mis_ext.rollout.generation import Generation


@dataclass(eq=False, kw_only=True, slots=True)
class KnownCall:
    """A call that sampled, and where it stands among those before it.

    Attributes:
        number: Its place in the order of calls.
        generation: The call.
        prompt: Its prompt; ids that an earlier call has too may be equal numbers of another type.
        spans: ``[start, end)`` of what was sampled in ``known()``, by call, this one's last.
        ancestor: The call of the most known ids with which its prompt begins, from which a sample goes on with this
            one; None: a sample begins with it.
        siblings: The calls of exactly this prompt so far.
        continued: There is a call that goes on from this one, in the same ids or in others.
    """

    number: int
    generation: Generation
    prompt: list[int]
    spans: list[tuple[int, int]]
    ancestor: KnownCall | None
    siblings: list[KnownCall] = field(default_factory=list)
    continued: bool = False

    def known(self, start: int = 0, stop: int | None = None) -> list[int]:
        """What the server was given, and what it sampled then, from one position to another."""
        size, stop = len(self.prompt), self.end if stop is None else stop
        return self.prompt[start:stop] + self.generation.sampled_ids[max(start - size, 0) : max(stop - size, 0)]

    @property
    def end(self) -> int:
        """The number of ids that are known after the call: its prompt and what it sampled."""
        return len(self.prompt) + len(self.generation.sampled_ids)

    @property
    def was_cut(self) -> bool:
        """Whether the token limit ended it."""
        return self.generation.finish_reason == "length"
