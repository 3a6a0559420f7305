"""Wrong answers to appendix D."""

from simplellm.engine.drafts import MIN_SPEEDUP
from wrong import wrong

LONGEST, SHORTEST = 4, 2  # as on the page


@wrong("accept_drafts", "after the last right draft is sure, too")
def gives_only_drafts(drafts, sampled):
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    return drafts[:right]


@wrong("accept_drafts", "a text that isn't there")
def goes_on_behind_a_wrong_one(drafts, sampled):
    right = [d for d, s in zip(drafts, sampled, strict=False) if d == s]
    return sampled[: len(right) + 1]


@wrong("accept_drafts", "a text that isn't there")
def takes_all(drafts, sampled):
    return list(sampled)


@wrong("accept_drafts", "expected")
def answers_with_the_wrong_draft(drafts, sampled):
    for position, draft in enumerate(drafts):
        if draft != sampled[position]:
            return drafts[: position + 1]
    return list(sampled)


@wrong("accept_drafts", "has to return a list")
def counts_them(drafts, sampled):
    return sum(d == s for d, s in zip(drafts, sampled, strict=False)) + 1


@wrong("accept_drafts", "returns nothing")
def forgets_to_return(drafts, sampled):
    right = [d for d, s in zip(drafts, sampled, strict=False) if d == s]
    sampled[: len(right) + 1]


def matches(tokens, n, ends):
    last = tokens[len(tokens) - n :]
    return (end for end in ends if tokens[end - n : end] == last)


def proposed(tokens, most, ns, ends):
    for n in ns:
        for end in matches(tokens, n, ends(n)):
            return tokens[end : end + most]
    return []


@wrong("propose", "the last time counts")
def finds_the_first_time(tokens, most):
    ns = range(LONGEST, SHORTEST - 1, -1)
    return proposed(tokens, most, ns, lambda n: range(n, len(tokens)))


@wrong("propose", "a longer match comes first")
def tries_short_ones_first(tokens, most):
    ns = range(SHORTEST, LONGEST + 1)
    return proposed(tokens, most, ns, lambda n: range(len(tokens) - 1, n - 1, -1))


@wrong("propose", "[1, 2, 3, 4] stood there")
def stops_before_the_longest(tokens, most):
    ns = range(LONGEST - 1, SHORTEST - 1, -1)
    return proposed(tokens, most, ns, lambda n: range(len(tokens) - 1, n - 1, -1))


@wrong("propose", "a match has 4 tokens at most")
def takes_a_longer_one(tokens, most):
    ns = range(LONGEST + 1, SHORTEST - 1, -1)
    return proposed(tokens, most, ns, lambda n: range(len(tokens) - 1, n - 1, -1))


@wrong("propose", "stood at the beginning")
def finds_the_end_itself(tokens, most):
    ns = range(LONGEST, SHORTEST - 1, -1)
    return proposed(tokens, most, ns, lambda n: range(len(tokens), n - 1, -1))


@wrong("propose", "may overlap with the end")
def lets_nothing_overlap(tokens, most):
    ns = range(LONGEST, SHORTEST - 1, -1)
    return proposed(tokens, most, ns, lambda n: range(len(tokens) - n, n - 1, -1))


@wrong("propose", "use the names")
def writes_the_longest_out(tokens, most):
    ns = range(4, SHORTEST - 1, -1)
    return proposed(tokens, most, ns, lambda n: range(len(tokens) - 1, n - 1, -1))


@wrong("propose", "use the names")
def writes_the_shortest_out(tokens, most):
    ns = range(LONGEST, 1, -1)
    return proposed(tokens, most, ns, lambda n: range(len(tokens) - 1, n - 1, -1))


@wrong("propose", "a match has 2 tokens at least")
def takes_a_single_token(tokens, most):
    ns = range(LONGEST, 0, -1)
    return proposed(tokens, most, ns, lambda n: range(len(tokens) - 1, n - 1, -1))


@wrong("propose", "are more than")
def forgets_most(tokens, most):
    return proposed(
        tokens,
        len(tokens),
        range(LONGEST, SHORTEST - 1, -1),
        lambda n: range(len(tokens) - 1, n - 1, -1),
    )


@wrong("acceptance", "nothing is known of a draft after a wrong one")
def divides_by_all(drafts, came):
    right = 0
    for draft, token in zip(drafts, came, strict=False):
        if draft != token:
            break
        right += 1
    return right, len(drafts)


@wrong("acceptance", "with all before them right")
def counts_behind_a_wrong_one(drafts, came):
    pairs = [*zip(drafts, came, strict=False)]
    return sum(d == t for d, t in pairs), len(pairs)


@wrong("acceptance", "a draft that was wrong was tried, too")
def counts_no_failure(drafts, came):
    right = 0
    for draft, token in zip(drafts, came, strict=False):
        if draft != token:
            break
        right += 1
    return right, right


@wrong("acceptance", "how many were right comes first")
def swaps_them(drafts, came):
    right = 0
    for draft, token in zip(drafts, came, strict=False):
        if draft != token:
            return right + 1, right
        right += 1
    return right, right


@wrong("acceptance", "return two numbers")
def gives_a_share(drafts, came):
    return sum(d == t for d, t in zip(drafts, came, strict=False)) / len(drafts)


@wrong("acceptance", "nothing is known")
def always_tries_one_more(drafts, came):
    right = 0
    for draft, token in zip(drafts, came, strict=False):
        if draft != token:
            break
        right += 1
    return right, right + 1


def survivals(chances, offered, chance_of=lambda chance, position: chance**position):
    found = [
        (chance_of(chance, position), -row)
        for row, chance in enumerate(chances)
        for position in range(1, offered[row] + 1)
    ]
    return sorted(found, reverse=True)


def chosen(ranked, rows, tokens, best, speed_of, stop=False):
    count = 0
    for number, (chance, _) in enumerate(ranked, 1):
        tokens += chance
        speed = speed_of(tokens, number)
        if speed > best:
            best, count = speed, number
        elif stop:
            break
    counts = [0] * rows
    for _, row in ranked[:count]:
        counts[-row] += 1
    return counts


@wrong("choose_counts", "one draft doesn't pay here, and three do")
def stops_at_the_first_loss(chances, offered, computed, max_drafts, cost):
    ranked, tokens = survivals(chances, offered)[:max_drafts], len(chances)
    best = MIN_SPEEDUP * tokens / cost(computed)
    speed = lambda tokens, n: tokens / cost(computed + n)  # noqa: E731
    return chosen(ranked, len(chances), tokens, best, speed, stop=True)


@wrong("choose_counts", "each token costs as much")
def ignores_the_cost(chances, offered, computed, max_drafts, cost):
    ranked, tokens = survivals(chances, offered)[:max_drafts], len(chances)
    return chosen(ranked, len(chances), tokens, tokens, lambda tokens, n: tokens)


@wrong("choose_counts", "the likeliest drafts come first")
def goes_by_request(chances, offered, computed, max_drafts, cost):
    ranked = sorted(survivals(chances, offered), key=lambda pair: -pair[1])[:max_drafts]
    tokens = len(chances)
    best = MIN_SPEEDUP * tokens / cost(computed)
    speed = lambda tokens, n: tokens / cost(computed + n)  # noqa: E731
    return chosen(ranked, len(chances), tokens, best, speed)


@wrong("choose_counts", "far drafts seldom survive")
def takes_the_chance_of_each(chances, offered, computed, max_drafts, cost):
    ranked = survivals(chances, offered, lambda chance, position: chance)[:max_drafts]
    tokens = len(chances)
    best = MIN_SPEEDUP * tokens / cost(computed)
    speed = lambda tokens, n: tokens / cost(computed + n)  # noqa: E731
    return chosen(ranked, len(chances), tokens, best, speed)


@wrong("choose_counts", "there's room for 3 drafts")
def forgets_the_room(chances, offered, computed, max_drafts, cost):
    ranked, tokens = survivals(chances, offered), len(chances)
    best = MIN_SPEEDUP * tokens / cost(computed)
    speed = lambda tokens, n: tokens / cost(computed + n)  # noqa: E731
    return chosen(ranked, len(chances), tokens, best, speed)


@wrong("choose_counts", "it gains less than MIN_SPEEDUP")
def takes_any_gain(chances, offered, computed, max_drafts, cost):
    ranked, tokens = survivals(chances, offered)[:max_drafts], len(chances)
    best = tokens / cost(computed)
    speed = lambda tokens, n: tokens / cost(computed + n)  # noqa: E731
    return chosen(ranked, len(chances), tokens, best, speed)


@wrong("choose_counts", "what its other tokens cost, too")
def pays_for_drafts_alone(chances, offered, computed, max_drafts, cost):
    ranked, tokens = survivals(chances, offered)[:max_drafts], len(chances)
    best = MIN_SPEEDUP * tokens / cost(len(chances))
    speed = lambda tokens, n: tokens / cost(len(chances) + n)  # noqa: E731
    return chosen(ranked, len(chances), tokens, best, speed)


@wrong("choose_counts", "expected no drafts")
def counts_drafts_alone(chances, offered, computed, max_drafts, cost):
    ranked = survivals(chances, offered)[:max_drafts]
    speed = lambda tokens, n: tokens / cost(computed + n)  # noqa: E731
    return chosen(ranked, len(chances), 0.0, 0.0, speed)


@wrong("choose_counts", "a number for each")
def gives_one_number(chances, offered, computed, max_drafts, cost):
    ranked, tokens = survivals(chances, offered)[:max_drafts], len(chances)
    best = MIN_SPEEDUP * tokens / cost(computed)
    speed = lambda tokens, n: tokens / cost(computed + n)  # noqa: E731
    return [sum(chosen(ranked, len(chances), tokens, best, speed))] * 2


@wrong("D.1", "of which one comes without a draft")
def counts_both_tokens(cost, batch):
    return cost(2 * batch) / cost(batch)


@wrong("D.1", "expected")
def takes_one_token_more(cost, batch):
    return cost(batch + 1) / cost(batch) - 1


@wrong("D.2", "steps, and yours takes")
def forgets_the_free_token(propose, tokens, start, most):
    position, steps, checked = start, 0, 0
    while position < len(tokens):
        drafts = propose(tokens[:position], min(most, len(tokens) - position - 1))
        right = 0
        while right < len(drafts) and drafts[right] == tokens[position + right]:
            right += 1
        position += max(right, 1)
        steps, checked = steps + 1, checked + len(drafts)
    return steps, checked


@wrong("D.2", "the last tokens need fewer")
def guesses_beyond_the_end(propose, tokens, start, most):
    position, steps, checked = start, 0, 0
    while position < len(tokens):
        drafts = propose(tokens[:position], most)
        right = 0
        while drafts[right : right + 1] == tokens[position + right :][:1] != []:
            right += 1
        position += right + 1
        steps, checked = steps + 1, checked + most
    return steps, checked


@wrong("D.2", "the text so far")
def shows_the_whole_text(propose, tokens, start, most):
    position, steps, checked = start, 0, 0
    while position < len(tokens):
        drafts = propose(tokens, min(most, len(tokens) - position - 1))
        right = 0
        while right < len(drafts) and drafts[right] == tokens[position + right]:
            right += 1
        position += right + 1
        steps, checked = steps + 1, checked + len(drafts)
    return steps, checked
