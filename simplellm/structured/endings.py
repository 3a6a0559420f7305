"""Which schemas no text that ends can fit, for they need themselves, again and again.

What one value has to fit may stand apart: in allOf, behind a $ref, beside anyOf. So
it is asked of sets of schemas, all of which a value fits at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# What of a schema counts here, beside what it leads to.
SAYING = frozenset(
    "type required properties additionalProperties minItems prefixItems items".split()
)
CHOICES = ("anyOf", "oneOf")
# Demands in all sets. Schemas that people use have some hundreds; of what is beyond we
# don't say that it can't end.
MAX_DEMANDS = 100_000

SchemaDict = Mapping[str, Any]
Demand = tuple[int, str]  # a schema's id, with "" or the choice of it that is meant
Demands = frozenset[Demand]


def listed(schema: SchemaDict, key: str) -> list[Any]:
    """The list under ``key``; empty if there is none."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def required_of(schema: SchemaDict) -> set[str]:
    """The names that an object must have."""
    return {name for name in listed(schema, "required") if isinstance(name, str)}


def kinds_of(schema: SchemaDict) -> set[str] | None:
    """The types that a schema allows; None for all of them."""
    kinds = schema.get("type")
    some = [kinds] if isinstance(kinds, str) else listed(schema, "type")
    return {kind for kind in some if isinstance(kind, str)} or None


def property_schema(schema: SchemaDict, name: str) -> Any:
    """What a schema says of a property, patterns aside."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return None if "patternProperties" in schema else schema.get("additionalProperties")


def item_schema(schema: SchemaDict, place: int) -> Any:
    """What a schema says of an array's item."""
    first = listed(schema, "prefixItems")
    return first[place] if place < len(first) else schema.get("items")


class Endings:
    """What of ``every`` schema of a document needs itself to end.

    ``targets`` are the schemas behind its $refs, no circle of which may stay beside
    itself.
    """

    def __init__(self, every: Sequence[SchemaDict], targets: Mapping[str, Any]) -> None:
        self.schemas = {id(schema): schema for schema in every}
        self.targets, self.left = targets, MAX_DEMANDS
        self.own = {id(schema): self.joined([schema]) for schema in every}
        # What each set needs: one of the first sets, one of the second and so on.
        self.needs: dict[Demands, list[list[Demands]]] = {}
        waiting = [*self.own.values()][::-1]
        while waiting:
            if (demands := waiting.pop()) not in self.needs:
                self.needs[demands] = needs = [*self.wanted(demands)]
                waiting += [one for some in needs for one in some]
        # Asked again until no more of them can end; what lies inside comes first.
        self.endless, count = {*self.needs}, -1
        left = [*self.needs][::-1]
        while len(self.endless) != count:
            count = len(self.endless)
            for demands in left:
                if not any(map(self.endless.issuperset, self.needs[demands])):
                    self.endless.discard(demands)
            left = [demands for demands in left if demands in self.endless]

    def has(self, schema: SchemaDict) -> bool:
        """Whether a text that fits ``schema`` can end."""
        return self.own[id(schema)] not in self.endless

    def joined(self, schemas: Iterable[Any], beside: Demands = frozenset()) -> Demands:
        """What a value has to fit that fits all of ``schemas``, and ``beside``.

        Nothing at all where there is no more room for it.
        """
        if self.left <= 0:
            return frozenset()
        found, waiting, seen = {*beside}, [*schemas], set[int]()
        self.left -= len(beside)
        while waiting and self.left > 0:
            schema = waiting.pop()
            self.left -= 1
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            if not SAYING.isdisjoint(schema):
                found.add((id(schema), ""))
            found |= {(id(schema), key) for key in CHOICES if listed(schema, key)}
            waiting += [
                *listed(schema, "allOf"),
                self.targets.get(schema.get("$ref", "")),
            ]
        return frozenset(found) if self.left > 0 else frozenset()

    def wanted(self, demands: Demands) -> Iterator[list[Demands]]:
        """What has to end inside of a value, or as what of its choices."""
        plain = frozenset(demand for demand in demands if not demand[1])
        for number, key in demands - plain:
            some = listed(self.schemas[number], key)
            yield [self.joined([one], beside=plain) for one in some]
        schemas = [self.schemas[number] for number, _ in plain]
        every = [kinds for one in schemas if (kinds := kinds_of(one)) is not None]
        kinds = set.intersection(*every) if every else set()
        if kinds == {"object"}:
            for name in sorted(set[str]().union(*map(required_of, schemas))):
                yield [self.joined(property_schema(one, name) for one in schemas)]
        if kinds == {"array"}:
            counts = [one.get("minItems") for one in schemas]
            least = max((n for n in counts if isinstance(n, int)), default=0)
            longest = max(len(listed(one, "prefixItems")) for one in schemas)
            for place in range(min(least, longest + 1)):
                yield [self.joined(item_schema(one, place) for one in schemas)]

    def needing_itself(self, schema: SchemaDict) -> int:
        """The id of one that needs itself, of what ``schema`` needs to end."""

        def rank(schema: SchemaDict) -> tuple[bool, bool]:
            return (id(schema), "") in self.own[id(schema)], "allOf" in schema

        # The one that says most of a set gives it its name.
        every = sorted(self.schemas.values(), key=rank)
        names = {self.own[id(one)]: id(one) for one in every}
        demands, way = self.own[id(schema)], list[Demands]()
        while demands not in way:
            way.append(demands)
            needs = self.needs[demands]
            demands = next(some[0] for some in needs if self.endless.issuperset(some))
        inside = [names[one] for one in way[way.index(demands) :] if one in names]
        return inside[0] if inside else [names[one] for one in way if one in names][-1]
