"""Counts of what was kept, cut or dropped on the way to tokens; digests of a data set's origin."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from blockwalk.data.rendered import Rendered
from blockwalk.plan.words import counted, is_or_are


@dataclass(frozen=True, slots=True)
class Origin:
    """Digests of what a data set's tokens are made of, by which a resumed run says what changed."""

    records: str = ""
    template: str = ""
    tokenizer: str = ""
    dated: bool = False
    """Whether the chat template writes the day on which it is asked."""

    def __add__(self, other: Origin) -> Origin:
        """Return the origin of two sources together."""
        return replace(self, records=digest_of(f"{self.records} {other.records}".encode()))


def digest_of(content: bytes) -> str:
    """Return 16 hexadecimal digits of a content."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


@dataclass(slots=True)
class EncodeReport:
    """Counts of the records, turns and tokens that were kept, cut or dropped when a data set became
    tokens."""

    records: int = 0
    truncated: int = 0
    answers_cut: int = 0
    """Records whose last learnt token was cut away."""
    prompts_lost: int = 0
    """Records whose prompt was cut away as a whole, for an answer that fills the row."""
    dropped: int = 0
    prompts_melted: int = 0
    """Judged records whose prompt, by itself, ends in other tokens than before an answer."""
    turns_left_out: int = 0
    longest: int = 0
    turns_marked: int = 0
    turns_of_others: int = 0
    turns_unwritten: int = 0
    unwritten: str = ""
    """Place and role of the first turn whose content the chat template dropped."""
    largest: tuple[int, str] = (-1, "")
    """The largest token id, and the place of a record that holds it."""
    turn_ends: Counter[int] = field(default_factory=Counter)
    """The last learnt token of each turn that a chat template wrote, and how often it is that."""
    stops: tuple[int, ...] = ()
    """Tokens that turns are learnt to end with, at which the model's generation does not stop of
    itself."""
    unread: tuple[str, ...] = ()
    """Columns that have a value in some record, and that no record's format reads."""
    without_template: int = 0
    """Records that are written as plain text, though the tokenizer has a chat template."""
    end_note: str = ""
    """A sentence where turns are learnt to end with no token that generation stops at."""
    origin: Origin = field(default_factory=Origin)
    max_length: int | None = None
    """Tokens that a row may have; None: as many as its record has."""

    def __add__(self, other: EncodeReport) -> EncodeReport:
        """Return the counts of two sources together."""
        counts = ("records", "truncated", "answers_cut", "prompts_lost", "dropped")
        turns = ("turns_left_out", "turns_marked", "turns_of_others", "turns_unwritten")
        names = (*counts, *turns, "prompts_melted", "without_template", "turn_ends", "origin")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return EncodeReport(
            **sums,
            longest=max(self.longest, other.longest),
            unwritten=self.unwritten or other.unwritten,
            unread=tuple(dict.fromkeys((*self.unread, *other.unread))),
            stops=tuple(dict.fromkeys((*self.stops, *other.stops))),
            end_note=self.end_note or other.end_note,
            largest=max(self.largest, other.largest),
            max_length=self.max_length,
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **values,
            "turn_ends": list(self.turn_ends.items()),
            "origin": asdict(self.origin),
        }

    @staticmethod
    def of_plain(values: Mapping[str, Any]) -> EncodeReport:
        """Return the report that :meth:`to_plain` gave the values of."""
        place = values["largest"]
        changes = {
            "largest": (int(place[0]), str(place[1])),
            "turn_ends": Counter(dict(values["turn_ends"])),
            "stops": tuple(values["stops"]),
            "unread": tuple(values["unread"]),
            "origin": Origin(**values["origin"]),
        }
        return EncodeReport(**{**values, **changes})

    def count(self, rendered: Rendered, length: int) -> None:
        """Count a record whose text has ``length`` tokens before it is cut."""
        self.records += 1
        self.turns_left_out += rendered.turns_left_out
        self.turns_marked += rendered.turns_marked
        self.turns_of_others += rendered.turns_of_others
        self.note_unwritten(rendered.place, rendered.unwritten)
        self.longest = max(self.longest, length)

    def note_unwritten(self, place: str, roles: Sequence[str]) -> None:
        """Count the turns of a record whose content the chat template dropped."""
        self.turns_unwritten += len(roles)
        if roles and not self.unwritten:
            self.unwritten = f"{place} (role {roles[0]!r})"

    def warnings(self) -> list[str]:
        """Return one sentence for each thing that a user should know of."""
        lines = []
        if self.truncated:
            lines.append(
                f"{self.truncated} of {self.records} records were longer than max_length ="
                f" {self.max_length} tokens (the longest: {self.longest}) and were cut; raise"
                " data.max_length to keep them whole"
            )
        if self.prompts_lost:
            lines.append(
                f"{self.prompts_lost} of {self.records} records lose their whole prompt, since the"
                f" answer alone fills max_length = {self.max_length}: the answer to nothing is"
                f" learnt. Set data.max_length to {self.longest}, or leave long records out"
            )
        if 2 * self.answers_cut > self.records:
            lines.append(
                f"{self.answers_cut} of {self.records} records, more than half, lose the end of"
                " what is learnt: the model does not learn to stop there. Set data.max_length to"
                f" {self.longest}, or leave long records out"
            )
        if self.dropped:
            lines.append(
                f"{self.dropped} of {self.records} records had no token to learn, after cutting,"
                " and were dropped"
            )
        if self.prompts_melted:
            lines.append(
                f"the prompt of {self.prompts_melted} of {self.records} records ends in other"
                " tokens where an answer follows: the answer begins where they part. End prompts"
                " with a whole word, and begin answers with the blank between"
            )
        if self.turns_left_out:
            lines.append(
                f"{counted(self.turns_left_out, 'assistant turn')} {is_or_are(self.turns_left_out)}"
                " not learnt: they open the conversation, or the chat template writes them"
                " differently once it goes on"
            )
        if self.end_note:
            lines.append(self.end_note)
        if self.unread:
            names = ", ".join(map(repr, self.unread[:8])) + " ..." * (len(self.unread) > 8)
            columns = f"{counted(len(self.unread), 'column')} {is_or_are(len(self.unread))}"
            lines.append(
                f"{columns} not read: {names}. data.columns and data.prompt read others, and"
                " data.template with data.label_field learns classes"
            )
        if self.without_template:
            lines.append(
                f"{counted(self.without_template, 'record')} of prompt and completion"
                f" {is_or_are(self.without_template)} learnt as plain text, without the model's"
                " chat template: give them as 'messages' to learn answers of a chat"
            )
        if self.turns_marked:
            turns = f"{counted(self.turns_marked, 'assistant turn')} {is_or_are(self.turns_marked)}"
            lines.append(f"{turns} not learnt: their records mark them so")
        if self.turns_of_others:
            lines.append(
                f"{counted(self.turns_of_others, 'turn')} of other roles than the assistant's"
                f" {is_or_are(self.turns_of_others)} marked as to be learnt, and not learnt: the"
                " assistant's alone are"
            )
        if self.turns_unwritten:
            lines.append(
                "the chat template drops content, reasoning or a call of"
                f" {counted(self.turns_unwritten, 'turn')}, the first in {self.unwritten}"
            )
        return lines
