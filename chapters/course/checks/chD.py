"""Appendix D: speculation."""

import inspect
import random
from contextlib import contextmanager
from itertools import product

LONGEST, SHORTEST = 4, 2  # of the page


def is_list(found, name, what="token ids"):
    """That a list of integers was returned."""
    assert found is not None, f"{name} returns nothing: is there a return?"
    whole = isinstance(found, list) and all(type(x) is int for x in found)
    assert whole, f"{name} has to return a list of {what}, and yours is {found!r}"


def sure(drafts, sampled):
    """The tokens up to the first wrong draft, by looking at all lengths."""
    right = max(n for n in range(len(drafts) + 1) if drafts[:n] == sampled[:n])
    return sampled[: right + 1]


def check_accept_drafts(accept_drafts):
    """Every case of three drafts over a small vocabulary, and fewer drafts."""
    for count in (0, 1, 2, 3):
        for drafts in map(list, product((5, 6), repeat=count)):
            for sampled in map(list, product((5, 6, 7), repeat=count + 1)):
                given = list(drafts), list(sampled)
                found = accept_drafts(*given)
                told = f"drafts {drafts}, sampled {sampled}"
                is_list(found, "accept_drafts")
                assert given == (drafts, sampled), f"{told}: yours changed them"
                expected = sure(drafts, sampled)
                right = len(expected) - 1
                assert found != drafts[:right] or found == expected, (
                    f"{told}: yours is {found}; the token that was sampled after the "
                    "last right draft is sure, too"
                )
                assert len(found) <= len(expected), (
                    f"{told}: yours is {found}; what stands after the first wrong "
                    "draft was sampled after a text that isn't there"
                )
                assert found == expected, f"{told}: expected {expected}, got {found}"


@contextmanager
def rebound(function, **values):
    """Other values of names that a function takes from its page."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    kept = {name: names[name] for name in values if name in names}
    names.update(values)
    try:
        yield
    finally:
        for name in values:
            names.pop(name)
        names.update(kept)


def followed(tokens, most, longest=LONGEST, shortest=SHORTEST):
    """What `propose` should say, and the n that it found."""
    text = " ".join(map(str, ["", *tokens, ""]))
    for n in range(longest, shortest - 1, -1):
        if n >= len(tokens):
            continue
        last = " ".join(map(str, ["", *tokens[-n:], ""]))
        index = text.rfind(last, 0, len(text) - 1)
        if index >= 0:
            end = text[: index + 1].count(" ") - 1 + n
            return tokens[end : end + most], n
    return [], 0


def check_propose(propose):
    """Texts of few tokens, where much repeats, against a search in strings."""
    cases = [
        ([1, 2, 3, 4, 5, 1, 2], 3, "[1, 2] stood at the beginning"),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, "it stood there twice, and the last time counts"),
        ([1, 2, 3, 7, 9, 2, 3, 8, 5, 1, 2, 3], 1, "a longer match comes first"),
        ([1, 2, 3, 4, 9, 0, 2, 3, 4, 8, 1, 2, 3, 4], 1, "[1, 2, 3, 4] stood there"),
        (
            [5, 1, 2, 3, 4, 9, 0, 1, 2, 3, 4, 8, 5, 1, 2, 3, 4],
            1,
            f"a match has {LONGEST} tokens at most, and the last time counts",
        ),
        ([7, 7, 7, 7], 3, "a match may overlap with the end, but isn't the end itself"),
        ([1, 2, 3], 3, "nothing matches"),
        ([3, 1, 4, 1], 3, f"a match has {SHORTEST} tokens at least"),
        ([1, 2, 3, 1, 2], 9, "more can't follow than the text has"),
        ([5], 3, "a text of a single token"),
        ([], 3, "an empty text"),
    ]
    generator = random.Random(0)
    for _ in range(300):
        tokens = [generator.randrange(3) for _ in range(generator.randrange(14))]
        cases.append((tokens, generator.randrange(1, 5), "what followed the last time"))
    for tokens, most, why in cases:
        given = list(tokens)
        found = propose(given, most)
        told = f"propose({tokens}, {most})"
        is_list(found, told)
        assert given == tokens, f"{told}: the text itself has to stay as it is"
        assert len(found) <= most, f"{told}: {found} are more than {most}"
        expected, _ = followed(tokens, most)
        assert found == expected, f"{told}: expected {expected}, got {found}: {why}"
    one, six = [3, 1, 4, 1], [0, 1, 2, 3, 4, 5, 7, 9, 1, 2, 3, 4, 5, 8]
    six += six[:6]
    for tokens, longest, shortest in ((one, 4, 1), (one, 1, 1), (six, 6, 2)):
        with rebound(propose, LONGEST=longest, SHORTEST=shortest):
            found = propose(list(tokens), 1)
        expected, _ = followed(tokens, 1, longest, shortest)
        assert found == expected, (
            f"with LONGEST = {longest} and SHORTEST = {shortest}, propose({tokens}, 1) "
            f"is {expected}, and yours is still {found}: use the names and not their "
            f"values {LONGEST} and {SHORTEST}, as an exercise changes them"
        )


def check_acceptance(acceptance):
    """Every case of up to three drafts, with fewer tokens and with more."""
    for count, length in product((1, 2, 3), (0, 1, 2, 3, 4)):
        for drafts in map(list, product((5, 6), repeat=count)):
            for came in map(list, product((5, 6), repeat=length)):
                found = acceptance(list(drafts), list(came))
                told = f"drafts {drafts}, and {came} came"
                assert found is not None, "acceptance returns nothing"
                pair = isinstance(found, tuple | list) and len(found) == 2
                assert pair, f"return two numbers, right and tried, not {found!r}"
                both = min(count, length)
                right = max(n for n in range(both + 1) if drafts[:n] == came[:n])
                tried = min(right + 1, both)
                assert tuple(found) != (tried, right) or tried == right, (
                    f"{told}: yours is {tuple(found)}; how many were right comes first"
                )
                assert found[0] == right, (
                    f"{told}: {right} were right with all before them right, and yours "
                    f"says {found[0]}"
                )
                assert found[1] >= tried, (
                    f"{told}: a draft that was wrong was tried, too; expected {tried}, "
                    f"got {found[1]}"
                )
                assert found[1] <= tried, (
                    f"{told}: nothing is known of a draft after a wrong one, or where "
                    f"no token came; expected {tried} tried, got {found[1]}"
                )


def speed(counts, chances, computed, cost):
    """Tokens a second with so many drafts of each request."""
    tokens = sum(
        sum(chance**position for position in range(count + 1))
        for count, chance in zip(counts, chances, strict=True)
    )
    return tokens / cost(computed + sum(counts))


def stairs(n):
    """Seconds that rise at 1, 4, 8, 16: as graphs of so many tokens would."""
    return {1: 1.0, 4: 1.5, 8: 1.9}.get(next(s for s in (1, 4, 8, 999) if n <= s), 4.0)


def check_choose_counts(choose_counts):
    """Against all choices there are, on costs that are flat, straight, or stairs."""
    free, straight, steep = (lambda n: 1.0), (lambda n: 1 + 0.1 * n), float
    late = {1: 1.0, 2: 1.9, 3: 1.9, 4: 1.9}.__getitem__
    hard = "each token costs as much as a step of one, so no draft is worth it"
    cases = [
        ([0.9], [3], 1, 9, free, "if tokens are free, all drafts are worth it"),
        ([0.9], [3], 1, 9, steep, hard),
        ([0.5], [9], 1, 9, straight, "far drafts seldom survive"),
        ([0.9, 0.5], [3, 3], 2, 3, free, "the likeliest drafts come first"),
        ([0.5, 0.9], [3, 3], 2, 3, free, "the likeliest drafts come first"),
        ([0.9], [3], 1, 9, late, "one draft doesn't pay here, and three do"),
        ([0.9, 0.8], [4, 4], 2, 3, free, "there's room for 3 drafts"),
        (
            [0.1],
            [4],
            1,
            4,
            lambda n: 1 + 0.095 * (n - 1),
            "it gains less than MIN_SPEEDUP",
        ),
        (
            [0.3],
            [3],
            900,
            9,
            straight,
            "the step costs what its other tokens cost, too",
        ),
        (
            [0.7] * 6,
            [1] * 6,
            6,
            9,
            lambda n: 1 + 0.12 * n,
            "each request gives a token",
        ),
        (
            [0.9, 0.9],
            [0, 2],
            2,
            9,
            free,
            "a request has only the drafts that it offers",
        ),
        ([0.0, 0.6], [2, 2], 2, 9, straight, "a draft that's never right is no gain"),
        ([], [], 7, 9, straight, "no request decodes"),
    ]
    generator = random.Random(0)
    for _ in range(60):
        size = generator.randrange(1, 4)
        chances = [round(generator.uniform(0.05, 0.95), 3) for _ in range(size)]
        offered = [generator.randrange(4) for _ in range(size)]
        max_drafts = generator.randrange(1, 7)
        costs = generator.choice([straight, stairs, lambda n: 1 + 0.02 * n])
        cases.append(
            (chances, offered, size, max_drafts, costs, "not the most a second")
        )
    for chances, offered, computed, max_drafts, cost, why in cases:
        given = list(chances), list(offered)
        found = choose_counts(*given, computed, max_drafts, cost)
        told = f"chances {chances}, offered {offered}, {max_drafts} drafts"
        is_list(found, "choose_counts", "numbers of drafts")
        assert given == (chances, offered), f"{told}: yours changed its arguments"
        assert len(found) == len(chances), f"{told}: a number for each, not {found}"
        fits = all(0 <= n <= most for n, most in zip(found, offered, strict=True))
        assert fits, f"{told}: {found}: a request has only the drafts that it offers"
        assert sum(found) <= max_drafts, (
            f"{told}: {found}: there's room for {max_drafts} drafts"
        )
        none = speed([0] * len(chances), chances, computed, cost)
        ranges = [range(n + 1) for n in offered]
        every = [c for c in product(*ranges) if sum(c) <= max_drafts]
        best = max(speed(c, chances, computed, cost) for c in every)
        if best <= 1.02 * none:
            expected = "no drafts"
            right = not any(found)
        else:
            expected = f"{best:.3f} tokens a second"
            right = speed(found, chances, computed, cost) > best * (1 - 1e-9)
        yours = speed(found, chances, computed, cost)
        assert right, (
            f"{told}: expected {expected}, yours are {found} with {yours:.3f}: {why}"
        )


def check_D_1(break_even):
    """Costs of which the answer is known."""
    for cost, batch, chance in (
        (lambda n: 1.0, 4, 0.0),
        (lambda n: 2.0 * n, 4, 1.0),
        (lambda n: 3 + n, 1, 0.25),
        (lambda n: 3 + n, 5, 0.625),
    ):
        found = break_even(cost, batch)
        assert found is not None, "break_even returns nothing"
        gain = (1 + chance) / cost(2 * batch) * cost(batch)
        assert abs(gain - 1) < 1e-9, "the check itself"
        assert abs(found - (1 + chance)) > 1e-9, (
            f"batch {batch}: yours is {found:.3f}; that's tokens of a step, of which "
            "one comes without a draft"
        )
        assert abs(found - chance) < 1e-9, (
            f"batch {batch}, cost {cost(batch)} and {cost(2 * batch)} with drafts: "
            f"expected {chance}, got {found}"
        )


def check_D_2(replayed):
    """Drafters that are always right, never right, and silent."""
    text = [random.Random(1).randrange(9) for _ in range(30)]

    def oracle(tokens, most):
        so_far = len(tokens) < len(text) and list(tokens) == text[: len(tokens)]
        assert so_far, "propose gets the text so far, and not what comes"
        return text[len(tokens) : len(tokens) + most]

    def wrong(tokens, most):
        return [99] * most

    def silent(tokens, most):
        return []

    def half(tokens, most):
        return [*text[len(tokens) :][:1], 99][:most]

    for propose, start, most, steps, drafts in (
        (silent, 10, 4, 20, 0),
        (oracle, 10, 3, 5, 15),
        (oracle, 9, 3, 6, 15),
        (oracle, 0, 9, 3, 27),
        (wrong, 27, 2, 3, 3),
        (half, 20, 2, 5, 9),
        (oracle, 30, 3, 0, 0),
    ):
        found = replayed(propose, list(text), start, most)
        assert found is not None and len(found) == 2, "return steps and drafts"
        told = (
            f"{propose.__name__} drafts, {30 - start} tokens to write, {most} at most"
        )
        assert found[0] == steps, f"{told}: {steps} steps, and yours takes {found[0]}"
        assert found[1] == drafts, (
            f"{told}: expected {drafts} drafts, and yours checks {found[1]}; the last "
            "tokens need fewer"
        )
