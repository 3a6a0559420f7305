"""Wrong answers to appendix B."""

import json
from functools import partial
from typing import Any

import numpy as np
from course.checks.chB import EMPTY, NOTHING

from simplellm.sampling.allowed_tokens import pack
from simplellm.text.harmony.turn import SHARED_RULES, call_rule, final_rule
from wrong import wrong


def then(*parts):
    *before, last = parts
    for part in reversed(before):
        if NOTHING in (part, last):
            return NOTHING
        if part[0] == "then":
            last = then(part[1], then(part[2], last))
        elif part != EMPTY:
            last = part if last == EMPTY else ("then", part, last)
    return last


def either(*parts):
    options: set[Any] = set()
    for part in parts:
        options |= part[1] if part[0] == "either" else {part}
    options.discard(NOTHING)
    if len(options) > 1:
        return ("either", frozenset(options))
    return options.pop() if options else NOTHING


def empty(node):
    """Whether an expression matches the empty text."""
    match node:
        case "then", first, rest:
            return empty(first) and empty(rest)
        case "either", options:
            return any(map(empty, options))
        case "rule", make:
            return empty(make())
    return node[0] == "many"


def derived(node, number, *, skips=True, adds=True, rounds=True, make=(then, either)):
    """The kept version, with what students change as switches."""
    build = partial(derived, skips=skips, adds=adds, rounds=rounds, make=make)
    chain, choice = make
    match node:
        case "byte", values:
            return EMPTY if number in values else NOTHING
        case "then", first, rest:
            found = chain(build(first, number), rest)
            if not (skips and empty(first)):
                return found
            other = build(rest, number)
            return choice(found, other) if adds else other
        case "either", options:
            return choice(*(build(option, number) for option in options))
        case "many", inner:
            found = build(inner, number)
            return chain(found, node) if rounds else found
        case "rule", rule:
            return build(rule(), number)


@wrong("derivative", "first may be empty")
def first_is_never_skipped(node, number):
    return derived(node, number, skips=False)


@wrong("derivative", "first may be empty")
def first_is_always_skipped(node, number):
    return derived(node, number, adds=False)


@wrong("derivative", "and then more rounds")
def one_round(node, number):
    return derived(node, number, rounds=False)


@wrong("derivative", "NOTHING")
def tuples_by_hand(node, number):
    def plain(*parts):
        return ("either", frozenset(parts))

    return derived(node, number, make=(lambda a, b: ("then", a, b), plain))


@wrong("derivative", "one option")
def first_option(node, number):
    return derived(node, number, make=(then, lambda *parts: parts[0]))


def is_none(there):
    return there is None


def walked(
    trie,
    automaton,
    state,
    *,
    jumps=True,
    start=0,
    inner=False,
    cuts=True,
    dead=is_none,
):
    """The kept version, with what students change as switches."""
    allowed, states, place = [], [state], 0
    while place < len(trie):
        byte, depth, token, after = trie[place]
        there = automaton.step(states[min(depth + start, len(states) - 1)], byte)
        if dead(there):
            place = after if jumps else place + 1
            continue
        if cuts:
            del states[depth + 1 :]
        states.append(there)
        if token is not None or inner:
            allowed.append(token)
        place += 1
    return allowed


@wrong("walk", "jump to `after`")
def goes_on_below(trie, automaton, state):
    return walked(trie, automaton, state, jumps=False)


@wrong("walk", "may come")
def keeps_old_states(trie, automaton, state):
    return walked(trie, automaton, state, cuts=False)


@wrong("walk", "isn't one")
def all_nodes(trie, automaton, state):
    return walked(trie, automaton, state, inner=True)


@wrong("walk", "may come")
def from_the_last_state(trie, automaton, state):
    return walked(trie, automaton, state, start=99)


@wrong("walk", "only None leads nowhere")
def takes_state_0_for_none(trie, automaton, state):
    return walked(trie, automaton, state, dead=lambda there: not there)


@wrong("walk", "are enough")
def each_token_from_its_beginning(trie, automaton, state):
    allowed: list[int] = []
    path: list[int] = []
    for byte, depth, token, _ in trie:
        path = [*path[:depth], byte]
        if token is not None and automaton.run(state, path) is not None:
            allowed.append(token)
    return allowed


class Rows:
    """The kept version, with what students change as switches."""

    ends = staticmethod(lambda automaton, state: automaton.ends(state))
    packs = staticmethod(pack)
    keeps = True

    def __init__(self, automaton, trie, vocab_size, end):
        self.automaton, self.trie = automaton, trie
        self.vocab_size, self.end = vocab_size, end
        self.kept = {}

    def row(self, state):
        if state not in self.kept or not self.keeps:
            allowed = np.zeros(self.vocab_size, dtype=bool)
            allowed[walked(self.trie, self.automaton, state)] = True
            allowed[self.end] = self.ends(self.automaton, state)
            self.kept[state] = self.packs(allowed)
        return self.kept[state]


@wrong("Masks.row", "may not end")
class AlwaysEnds(Rows):
    ends = staticmethod(lambda automaton, state: True)


@wrong("Masks.row", "may end")
class NeverEnds(Rows):
    ends = staticmethod(lambda automaton, state: False)


@wrong("Masks.row", "keep it")
class MadeEachTime(Rows):
    keeps = False


@wrong("Masks.row", "3 words")
class Bools(Rows):
    packs = staticmethod(lambda allowed: allowed)


@wrong("Masks.row", "these may come")
class HighestBitFirst(Rows):
    packs = staticmethod(
        lambda allowed: np.packbits(np.pad(allowed, (0, -len(allowed) % 32))).view(
            "<u4"
        )
    )


KEPT: dict[int, Any] = {}


@wrong("Masks.row", "belongs to self")
class OneForAll(Rows):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept = KEPT


def pushed(
    automaton,
    state,
    tokens,
    encode,
    *,
    cut=True,
    stops=True,
    most=1000,
    any_token=False,
    bytewise=False,
    whole=True,
    last=False,
    goes_back=True,
    gives_up=False,
):
    """The kept version, with what students change as switches."""
    found, states = b"", [state]
    while len(found) < most and not (stops and automaton.ends(states[-1])):
        live = [n for n in range(256) if automaton.step(states[-1], n) is not None]
        if len(live) != 1:
            break
        found += bytes(live)
        states.append(automaton.step(states[-1], live[0]))
    text = found.decode(errors="ignore" if whole else "replace")
    if gives_up and text.encode() != found:
        return []
    there = states[-1]
    found = text.encode() if whole else found
    there = states[len(found)] if goes_back else there
    if bytewise:
        return [id for letter in text for id in encode(letter)]
    if not cut:
        return encode(text)

    def reaches(begun):
        after = (t[len(begun) :] for t in tokens.values() if t.startswith(begun))
        if any_token:
            return any(after)
        return any(more and automaton.run(there, more) is not None for more in after)

    places = range(len(found))
    places = places[::-1] if last else places
    left = next((i for i in places if reaches(found[i:])), len(found))
    kept = []
    for id in encode(text):
        left -= len(tokens[id])
        if left < 0:
            break
        kept.append(id)
    return kept


@wrong("forced", "could reach across")
def all_of_them(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, cut=False)


@wrong("forced", "encode all forced bytes at once")
def letter_by_letter(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, bytewise=True)


@wrong("forced", "may not come")
def past_the_end(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, stops=False)


@wrong("forced", "only a token that may come")
def any_longer_token(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, any_token=True)


@wrong("forced", "the state that it's given")
def from_the_beginning(automaton, state, tokens, encode):
    return pushed(automaton, 0, tokens, encode)


@wrong("forced", "may not come")
def half_a_character(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, cut=False, whole=False)


@wrong("forced", "the first one counts")
def cuts_at_the_last_place(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, last=True)


@wrong("forced", "the state is the one there")
def state_behind_half_a_character(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, goes_back=False)


@wrong("forced", "the tokens before it")
def gives_up_inside_of_a_character(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, gives_up=True)


@wrong("forced", "at most 1,000")
def without_a_limit(automaton, state, tokens, encode):
    return pushed(automaton, state, tokens, encode, most=3000)


def a_turn(
    answer,
    calls,
    *,
    start="(analysis | preamble)* end",
    forced="analysis? preamble? end",
    final=True,
    names=lambda number, function: f"call_{number}",
    wrap=lambda rule: rule,
    first=None,
):
    """The kept version, with what students change as switches."""
    texts, endings = {}, []
    if answer is not None or final is None:
        texts["final"] = answer or {"lark_grammar": "start: /(?s:.*)/\n"}
        endings.append(wrap(final_rule("final")))
    for number, (function, arguments) in enumerate([*calls.items()][:first]):
        texts[name := names(number, function)] = arguments
        endings.append(call_rule(function, name))
    ends = "\nend: " + "\n  | ".join(endings)
    start = forced if answer is None and start.endswith("* end") else start
    turn = {"lark_grammar": f"start: {start}" + ends + SHARED_RULES}
    named = [{"name": name, **rules} for name, rules in texts.items()]
    return json.dumps({"grammars": [turn, *named]})


@wrong("turn_grammar", "thoughts come first")
def no_thoughts(answer, calls):
    return a_turn(answer, calls, start="end").replace("preamble:", "unused:")


@wrong("turn_grammar", "any number")
def one_message_before(answer, calls):
    return a_turn(answer, calls, start="(analysis | preamble)? end")


@wrong("turn_grammar", "a second thought may not")
def thinks_for_ever(answer, calls):
    return a_turn(answer, calls, forced="(analysis | preamble)* end")


@wrong("turn_grammar", "may begin with its answer")
def always_thinks(answer, calls):
    return a_turn(answer, calls, start="(analysis | preamble)+ end")


@wrong("turn_grammar", "no final one")
def answers_anyway(answer, calls):
    return a_turn(answer, calls, final=None)


@wrong("turn_grammar", "you refuse it")
def first_function_only(answer, calls):
    return a_turn(answer, calls, first=1)


@wrong("turn_grammar", "there may be an answer")
def names_as_they_are(answer, calls):
    return a_turn(answer, calls, names=lambda number, function: function)


@wrong("turn_grammar", "is a call")
def arguments_of_the_last(answer, calls):
    return a_turn(answer, dict.fromkeys(calls, [None, *calls.values()][-1]))


@wrong("turn_grammar", "may begin with its answer")
def answers_without_end(answer, calls):
    return a_turn(answer, calls, wrap=lambda rule: rule.removesuffix("<|return|>"))


@wrong("turn_grammar", "a turn is over")
def one_ending_after_the_other(answer, calls):
    return a_turn(answer, calls, wrap=lambda rule: f"({rule})+")


@wrong("turn_grammar", "ends with an answer")
def ends_in_the_middle(answer, calls):
    return a_turn(answer, calls, start="(analysis | preamble)* end?")


def chance(logprobs, bits, *, order="little", of=np.exp):
    """The kept version, with what students change as switches."""
    allowed = np.unpackbits(bits.view(np.uint8), bitorder=order)[: len(logprobs)]
    return of(logprobs)[allowed == 1].sum()


@wrong("B.1", "probabilities add up")
def counts(logprobs, bits):
    return chance(logprobs, bits, of=lambda logs: np.full(len(logs), 1 / len(logs)))


@wrong("B.1", "is token v's")
def highest_bit_first(logprobs, bits):
    return chance(logprobs, bits, order="big")


@wrong("B.1", "between 0 and 1")
def logs(logprobs, bits):
    return chance(logprobs, bits, of=lambda logs: logs)


def reached(node, most, *, nothing=False, depth=10**6, over=0):
    found, circle = {node}, [node]
    while circle and depth:
        depth -= 1
        steps = {derived(n, number) for n in circle for number in range(256)}
        circle = [n for n in steps - found if nothing or n != NOTHING]
        found |= set(circle)
        if len(found) > most + over:
            return None
    return len(found)


@wrong("B.2", "NOTHING is none")
def nothing_too(node, most):
    return reached(node, most, nothing=True)


@wrong("B.2", "go on from new states")
def three_bytes_far(node, most):
    return reached(node, most, depth=3)


@wrong("B.2", "isn't over")
def one_too_early(node, most):
    return reached(node, most, over=-1)


def circles(automaton, state, most, *, remembers=True, offset=0):
    seen, circle = {state}, [state]
    for count in range(most + 1 + offset):
        if any(map(automaton.ends, circle)):
            return count
        steps = (automaton.step(s, n) for s in circle for n in range(256))
        circle = [s for s in steps if s is not None and s not in seen]
        if remembers:
            circle = list(dict.fromkeys(circle))
            seen |= set(circle)
    return None


@wrong("B.3", "aren't over")
def one_byte_short(automaton, state, most):
    return circles(automaton, state, most, offset=-1)


@wrong("B.3", "again and again")
def forgets_where_it_was(automaton, state, most):
    return circles(automaton, state, most, remembers=False)


@wrong("B.3", "the fewest bytes")
def any_way_to_an_end(automaton, state, most):
    for count in range(most + 1):
        if automaton.ends(state):
            return count
        live = [automaton.step(state, n) for n in range(256)]
        state = [s for s in live if s is not None][-1]
    return None
