"""How what several engines say of themselves becomes one record, field by field."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

Record = TypeVar("Record")


def sum_by_key(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    whole = Counter[str]()
    for one in counts:
        whole.update(one)  # which keeps what was counted and never happened
    return dict(whole)


# The metadata that each field needs. ``join`` gets the values that are not None; those
# of engines that have ended are among them if it ``lasts``.
COUNT: dict[str, Any] = {"join": sum, "lasts": True}
COUNTS: dict[str, Any] = {"join": sum_by_key, "lasts": True}
NOW: dict[str, Any] = {"join": sum, "lasts": False}
SHARE: dict[str, Any] = {"join": lambda x: sum(x) / max(1, len(x)), "lasts": False}
SLOWEST: dict[str, Any] = {"join": lambda x: max(x, default=None), "lasts": True}


def join_records(
    kind: type[Record], running: Sequence[Record], ended: Sequence[Record] = ()
) -> Record:
    """One ``kind`` of record for all engines, those that run and those that did."""
    whole: dict[str, Any] = {}
    for spec in fields(kind):  # type: ignore[arg-type]
        every = [*running, *ended] if spec.metadata["lasts"] else running
        values = [getattr(one, spec.name) for one in every]
        whole[spec.name] = spec.metadata["join"]([x for x in values if x is not None])
    return kind(**whole)
