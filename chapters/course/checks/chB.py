"""Appendix B: structured output."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import llguidance
import numpy as np

from simplellm.api.llm import LLM

# Expressions are the chapter's tuples.
NOTHING: tuple[Any, ...] = ("byte", frozenset())
EMPTY = ("many", NOTHING)


def byte(characters):
    return ("byte", frozenset(characters.encode()))


def literal(text):
    """Exactly this text, which has at least one character."""
    *before, node = (byte(character) for character in text)
    for part in reversed(before):
        node = ("then", part, node)
    return node


def either(*options):
    return ("either", frozenset(options))


def chain(*parts):
    *before, node = parts
    for part in reversed(before):
        node = ("then", part, node)
    return node


A, B = byte("a"), byte("b")
MAYBE = either(EMPTY, A)


def brackets():
    """Pairs of square brackets around each other, at least one."""
    return chain(byte("["), either(EMPTY, BRACKETS), byte("]"))


BRACKETS = ("rule", brackets)


def is_empty(node) -> bool:
    """Whether an expression matches the empty text."""
    kind, *parts = node
    if kind == "then":
        return all(map(is_empty, parts))
    if kind == "either":
        return any(map(is_empty, parts[0]))
    if kind == "rule":
        return is_empty(parts[0]())
    return kind == "many"


def size(node) -> int:
    """How many parts an expression has."""
    kind, *parts = node
    if kind in ("byte", "rule"):
        return 1
    return 1 + sum(map(size, parts[0] if kind == "either" else parts))


# An expression, the same for Python's re, and what to think of where it goes wrong.
DERIVED = [
    (A, "a", "after its byte, one byte leaves EMPTY, and after another one NOTHING"),
    (literal("aba"), "aba", "the derivative of first, and rest after it"),
    (either(literal("ab"), literal("ba")), "ab|ba", "one option may still come"),
    (either(literal("ab"), literal("aa")), "ab|aa", "both options may still come"),
    (("many", literal("ab")), "(ab)*", "the rest of a round, and then more rounds"),
    (chain(MAYBE, B), "a?b", "first may be empty: then the byte is one of rest's"),
    (
        chain(("many", A), MAYBE, B),
        "a*a?b",
        "first may be empty: then the byte is one of rest's, or else one of first's",
    ),
    (("many", chain(MAYBE, MAYBE, B)), "(a?a?b)*", "first may be empty"),
    (
        chain(("many", either(A, B)), A, either(A, B)),
        "[ab]*a[ab]",
        "first may be empty, and its own derivative is another possibility",
    ),
    (NOTHING, "[^ab]", "nothing can follow on nothing"),
]


def after(derivative, node, text: str) -> Any:
    """The derivative by all bytes of ``text``."""
    for number in text.encode():
        node = derivative(node, number)
        assert isinstance(node, tuple) and node, (
            f"a derivative is an expression, a tuple, not {node!r}"
        )
    return node


def check_derivative(derivative):
    """By the words it leads to, as re sees them; and it mustn't grow."""
    words = [""]
    for _ in range(5):
        words += [word + letter for word in words for letter in "ab"]
    for node, pattern, why in DERIVED:
        for word in sorted(set(words), key=lambda word: (len(word), word)):
            expected = bool(re.fullmatch(pattern, word))
            found = is_empty(after(derivative, node, word))
            assert found == expected, (
                f"{pattern!r} {'matches' if expected else 'refuses'} {word!r}, and "
                f"your derivatives don't: {why}"
            )
        for word in ("a", "b", "ab", "ba", "abab"):
            hopeless = not any(re.fullmatch(pattern, word + more) for more in {*words})
            if hopeless:
                found = after(derivative, node, word)
                assert found == NOTHING, (
                    f"{pattern!r} can't go on after {word!r}, so the derivative is "
                    f"NOTHING, and yours is {found!r}"
                )
    assert is_empty(after(derivative, BRACKETS, "[[[]]]")), (
        "a rule's derivative is that of the expression which its function returns"
    )
    assert after(derivative, BRACKETS, "[]]") == NOTHING, "]] closes one too many"
    snowman = chain(*(("byte", frozenset([n])) for n in "☃".encode()))
    assert is_empty(after(derivative, snowman, "☃")), "bytes run to 255"
    node, largest = chain(("many", either(A, B)), A, either(A, B)), 0
    for _ in range(60):
        node = derivative(node, ord("a"))
        largest = max(largest, size(node))
        assert largest < 100, (
            f"your derivatives grow: the same expression is written as {largest} parts "
            "by now; make them with then() and either()"
        )


class Table:
    """An automaton that knows some texts, and counts the steps that it's asked for."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self.texts = set(texts)
        self.prefixes = {t[:i]: 0 for t in self.texts for i in range(len(t) + 1)}
        self.prefixes = {prefix: n for n, prefix in enumerate(sorted(self.prefixes))}
        self.names = {n: prefix for prefix, n in self.prefixes.items()}
        self.asked: list[tuple[int, int]] = []

    def step(self, state, number):
        assert state is not None, (
            "you ask for a step from None: below a node that leads nowhere there's "
            "nothing to see"
        )
        self.asked.append((state, number))
        return self.prefixes.get(self.names[state] + bytes([number]))

    def run(self, state, text):
        for number in text:
            state = self.step(state, number)
            if state is None:
                return None
        return state

    def ends(self, state):
        return self.names[state] in self.texts


class Loop:
    """An automaton of a single state: any text of a few bytes."""

    def __init__(self, known: bytes) -> None:
        self.known = known

    def step(self, state, number):
        return 0 if state == 0 and number in self.known else None

    def run(self, state, text):
        return 0 if state == 0 and set(text) <= set(self.known) else None

    def ends(self, state):
        return True


def trie_of(tokens) -> list[tuple[Any, ...]]:
    """(byte, depth, token or None, after) in the order of a visit."""
    ids = {token: id for id, token in tokens.items()}
    nodes = sorted({token[: i + 1] for token in ids for i in range(len(token))})
    trie = []
    for place, node in enumerate(nodes):
        end = place + 1
        while end < len(nodes) and nodes[end].startswith(node):
            end += 1
        trie.append((node[-1], len(node) - 1, ids.get(node), end))
    return trie


WORDS = b"1 12 123 1, 2 , } ,} nu null null} n x xyz xyzz".split()


def check_walk(walk):
    """Against each token by itself, with no look below a dead branch."""
    tokens = dict(enumerate(WORDS))
    trie = trie_of(tokens)
    texts = (b"12,}", b"12}", b"1,}", b"null}", b"2}")
    automaton = Table(texts)
    for state, prefix in automaton.names.items():
        expected = {
            id for id, token in tokens.items() if prefix + token in automaton.prefixes
        }
        automaton.asked = []
        found = walk(trie, automaton, state)
        assert found is not None, "return the ids of the tokens"
        found = list(found)
        given = [tokens[id] for id in found if id in tokens]
        assert None not in found, (
            "a node in which no token ends has no id: None isn't one"
        )
        missing = [tokens[id] for id in expected - set(found)]
        assert not missing, f"after {prefix!r}, {missing} may come, and you miss them"
        wrong = [tokens[id] for id in set(found) - expected]
        assert not wrong, (
            f"after {prefix!r} you allow {wrong}, whose bytes lead nowhere: a node's "
            "step begins in the state that its parent has left"
        )
        assert len(found) == len(set(found)), f"a token comes twice: {given}"
        seen = sum(
            prefix + node in automaton.prefixes
            or node[:-1] == b""
            or prefix + node[:-1] in automaton.prefixes
            for node in {token[: i + 1] for token in WORDS for i in range(len(token))}
        )
        asked = len(set(automaton.asked))
        assert len(automaton.asked) <= seen + 2, (
            f"{len(automaton.asked)} steps where {seen} are enough: jump to `after` "
            "below a node that leads nowhere, and take each node's step once"
        )
        assert asked <= seen, f"{asked} different steps where {seen} are enough"
    found = [tokens[id] for id in walk(trie, Loop(b"123,"), 0)]
    expected_words = [word for word in WORDS if set(word) <= set(b"123,")]
    assert sorted(found) == sorted(expected_words), (
        "where each step leads back to state 0, as in a*, expected "
        f"{sorted(expected_words)}, got {sorted(found)}: 0 is a state as any other, "
        "and only None leads nowhere"
    )


@cache
def engine() -> LLM:
    return LLM(device="cpu")


def bits_as_ids(bits) -> set[int]:
    found = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(found).tolist())


def check_Masks_row(kind):
    """The bits of walk, the end token where the text may end, made once."""
    tokens = dict(enumerate(WORDS))
    automaton = Table((b"12,}", b"12", b"null}"))
    end, vocab = 70, 75
    masks = kind(automaton, trie_of(tokens), vocab, end)
    rows = {}
    for state, prefix in automaton.names.items():
        rows[state] = row = masks.row(state)
        assert isinstance(row, np.ndarray), f"a row is a NumPy array, not {type(row)}"
        assert row.shape == (3,) and row.dtype.itemsize == 4, (
            f"75 tokens are 3 words of 32 bits; yours is {row.dtype} {row.shape}: pack "
            "makes them of a bool for each token of the vocabulary"
        )
        found = bits_as_ids(row)
        ends = automaton.ends(state)
        assert (end in found) == ends, (
            f"after {prefix!r} the text {'may' if ends else 'may not'} end, and "
            f"the end token is {'' if end in found else 'not '}allowed"
        )
        expected = {
            id for id, token in tokens.items() if prefix + token in automaton.prefixes
        }
        assert found - {end} == expected, (
            f"after {prefix!r} these may come: {sorted(expected)}, and you allow "
            f"{sorted(found - {end})}"
        )
    automaton.asked = []
    for state, row in rows.items():
        again = masks.row(state)
        assert again is row, "for the same state it's the same array: keep it"
    assert not automaton.asked, "a row that's kept needs no walk"
    other = kind(Table((b"2}",)), trie_of(tokens), vocab, end)
    assert bits_as_ids(other.row(0)) == {4}, (
        "other masks have other rows: what you keep belongs to self"
    )


def common(sequences: Sequence[Sequence[int]]) -> list[int]:
    """What all begin with."""
    found = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        found.append(column[0])
    return found


def longest_first(tokens, text):
    """The ids of ``text``, the longest token that fits first."""
    rest, ids = text.encode(), []
    while rest:
        fits = [id for id, token in tokens.items() if rest.startswith(token)]
        ids.append(max(fits, key=lambda id: len(tokens[id])))
        rest = rest[len(tokens[ids[-1]]) :]
    return ids


def check_forced(forced):
    """Never more than all texts' tokens begin with; and as much as is certain."""
    tokenizer = engine().tokenizer
    tokens, encode = tokenizer.tokens, tokenizer.encode

    def ask(texts, state=0):
        automaton = Table(text.encode() for text in texts)
        found = forced(automaton, state, tokens, encode)
        assert found is not None, "return a list of token ids, empty if none is forced"
        return list(found)

    (minus,) = encode(" -")
    assert tokens[minus] == b" -", "the vocabulary has a token of a space and a minus"
    for texts in (
        ('{"result": 1}', '{"result": 2}'),
        ('{"result": -1}', '{"result": 2}'),
        ("yes", "no"),
        ("the answer: é", "the answer: è"),
        ("the answer: ☃", "the answer: ☂"),
        ("sort", "sort it"),
        ("sorted", "sort it"),
        ("result", "results"),
    ):
        found = ask(texts)
        known = common([encode(text) for text in texts])
        said = b"".join(tokens[id] for id in found)
        assert found == known[: len(found)], (
            f"of {' and '.join(texts)} you force {said!r} as "
            f"{[tokens[id] for id in found]}; the texts themselves begin with "
            f"{[tokens[id] for id in known]}: encode all forced bytes at once, and "
            "leave what a token could reach across or what may not come"
        )
    found = ask(('{"result": 1}', '{"result": 2}'))
    assert found == encode('{"result": '), (
        f"all of '{{\"result\": ' is certain, and you force "
        f"{tokenizer.decode(found)!r}: only a token that may come can reach across"
    )
    found = ask(('{"result": -1}', '{"result": 2}'))
    assert found == encode('{"result":'), (
        f"up to the colon all is certain; you force {tokenizer.decode(found)!r}"
    )
    only = "What is 47 + 85?"
    found = ask((only,))
    assert found == encode(only), (
        f"there's one text only, {only!r}, and you force {tokenizer.decode(found)!r}"
    )
    automaton = Table([b'{"result": 1}', b'{"result": 2}'])
    middle = automaton.run(0, b'{"')
    found = list(forced(automaton, middle, tokens, encode))
    assert found == encode('result": '), (
        "it begins in the state that it's given, not at the first one"
    )

    for words, texts, why in (
        (
            ("a", "b", "c", "d", "abc", "bc"),
            ("abc", "abd"),
            "of the places where a token could begin that reaches across, the first "
            "one counts",
        ),
        (
            ("a", "é", "è", "aé"),
            ("aé", "aè"),
            "having gone back to the beginning of a character, the state is the one "
            "there, too",
        ),
    ):
        few = dict(enumerate(word.encode() for word in words))
        known = common([longest_first(few, text) for text in texts])
        automaton = Table(text.encode() for text in texts)
        found = list(forced(automaton, 0, few, partial(longest_first, few)))
        assert found == known[: len(found)], (
            f"with the tokens {', '.join(words)} and the texts {' and '.join(texts)} "
            f"you force {[words[id] for id in found]}: {why}"
        )

    few = dict(enumerate(word.encode() for word in ("a", "b", "é", "è")))
    automaton = Table(text.encode() for text in ("abé", "abè"))
    found = list(forced(automaton, 0, few, partial(longest_first, few)))
    assert found == [0, 1], (
        "with the tokens a, b, é, è and the texts abé and abè, a and b are certain, "
        "and so is the first byte of what follows; you force "
        f"{[few[id].decode() for id in found]}: where the bytes stop inside of a "
        "character, go back to its beginning, and give the tokens before it"
    )

    class Endless(Table):
        def step(self, state, number):
            return 0 if number == ord("x") else None

        def ends(self, state):
            return False

    found = list(forced(Endless([b""]), 0, tokens, encode))
    assert len(found) <= 1000, "at most 1,000 bytes: some forms never end"


THOUGHT = "<|channel|>analysis<|message|>7+5=12. {<|end|><|start|>assistant"
NOTE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>{}<|return|>"
TYPED = "<|channel|>final <|constrain|>json<|message|>{}<|return|>"
BEFORE = " to=functions.{}<|channel|>commentary<|message|>{}<|call|>"
BEHIND = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
YES: dict[str, Any] = {"lark_grammar": 'start: "yes"\n'}
HOW: dict[str, Any] = {"lark_grammar": 'start: "so"\n'}
DIGITS: dict[str, Any] = {"lark_grammar": "start: /[0-9]+/\n"}


class Wrapped:
    """The embedded tokenizer, as llguidance wants it."""

    bos_token_id = None

    def __init__(self) -> None:
        tokenizer, size = engine().tokenizer, engine().config.vocab_size
        self.tokens = [tokenizer.token_bytes(id) for id in range(size)]
        self.special_token_ids = [id for id in range(size) if tokenizer.is_special(id)]
        self.eos_token_id = tokenizer.special["<|endoftext|>"]  # none of a turn's

    def __call__(self, text):
        text = text if isinstance(text, str) else text.decode()
        return engine().tokenizer.encode(text)


@cache
def vocabulary() -> Any:
    wrapper = llguidance.TokenizerWrapper(Wrapped())
    return llguidance.LLTokenizer(wrapper, engine().config.vocab_size)


def accepts(grammar: str, text: str) -> bool:
    """Whether ``text`` is a whole turn of ``grammar``."""
    matcher = llguidance.LLMatcher(vocabulary(), grammar, log_level=0)
    assert not matcher.is_error(), (
        f"llguidance can't read it: {matcher.get_error().partition(chr(10))[0]}"
    )
    ids = engine().tokenizer.encode(text, special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def check_turn_grammar(turn_grammar):
    """Whole turns, accepted or refused by llguidance."""
    text = turn_grammar(YES, {})
    assert isinstance(text, str), f"it's JSON, a str, and not {type(text).__name__}"
    assert "grammars" in json.loads(text), '{"grammars": [...]}, the turn first'
    thought, whole = THOUGHT, FINAL.format("yes")
    for turn, why in (
        (whole, "a turn may begin with its answer"),
        (thought + whole, "thoughts come first, if the model likes"),
        (thought + NOTE + thought + whole, "any number of messages may come first"),
        (TYPED.format("yes"), "the header may say json"),
    ):
        assert accepts(text, turn), f"{why}: {turn!r} is a turn, and you refuse it"
    for turn, why in (
        (thought + FINAL.format("no"), "the answer has to fit its rules"),
        (thought + FINAL.format("yes!"), "the answer has to fit its rules, all of it"),
        (thought, "a turn ends with an answer or a call"),
        (whole.replace("<|return|>", ""), "<|return|> ends an answer"),
        (whole.replace("<|return|>", "<|end|>"), "<|return|> ends an answer"),
        (BEFORE.format("add", "7"), "no function is offered, so none can be called"),
        (whole + whole, "after its answer a turn is over"),
    ):
        assert not accepts(text, turn), f"{why}: {turn!r} is none, and you accept it"
    calls = {"add": DIGITS, "get-time": YES, "final": HOW}
    pairs = [("add", "7", "yes"), ("get-time", "yes", "7"), ("final", "so", "yes")]
    for answer in (None, YES):
        text = turn_grammar(answer, calls)
        allowed = accepts(text, thought + whole)
        if answer is None:
            assert not allowed, "answer is None: there can be no final one"
            call = BEFORE.format("add", "7")
            assert not accepts(text, 2 * thought + call), (
                "where a call has to come, a second thought may not: it would be the "
                "same once more"
            )
        else:
            assert allowed, "with functions there may be an answer all the same"
        for form in (BEFORE, BEHIND):
            for name, given, other in pairs:
                turn = thought + NOTE + form.format(name, given)
                assert accepts(text, turn), f"{turn!r} is a call, and you refuse it"
                turn = form.format(name, other)
                assert not accepts(text, turn), (
                    f"{turn!r} has the arguments of another function, or none of its "
                    "own, and you accept it: each function has its own rules"
                )
            assert not accepts(text, 2 * form.format("add", "7")), (
                "after its call a turn is over, and you let another one follow"
            )
            assert not accepts(text, form.format("sub", "7")), (
                "sub isn't offered, and you let the model call it"
            )


def check_B_1(allowed_share):
    """Sums over random masks, with a vocabulary that isn't a multiple of 32."""
    rng = np.random.default_rng(0)
    for size in (32, 75, 1088):
        logits = rng.normal(size=size) * 3
        logprobs = logits - np.log(np.exp(logits).sum())
        allowed = rng.random(size) < 0.3
        padded = np.concatenate([allowed, np.ones(-size % 32, dtype=bool)])
        bits = np.packbits(padded, bitorder="little").view("<u4")
        expected = sum(np.exp(logprobs[i]) for i in range(size) if allowed[i])
        share = allowed_share(logprobs, bits)
        assert 0 <= share <= 1 + 1e-6, f"a share lies between 0 and 1, not {share}"
        assert abs(share - expected) < 1e-6, (
            f"of {size} tokens the {allowed.sum()} allowed ones have {expected:.4f}, "
            f"and you say {share:.4f}: probabilities add up, and bit v % 32 of word "
            "v // 32 is token v's"
        )


def check_B_2(count_states):
    """Known counts, and a limit that holds."""
    both = either(A, B)
    for node, expected in (
        (literal("ab"), 3),
        (("many", A), 1),
        (either(literal("abba"), literal("b")), 6 - 1),
        (("byte", frozenset([0, 255])), 2),
    ):
        found = count_states(node, 100)
        assert found == expected, (
            f"{node} has {expected} states, its first one included, and NOTHING is "
            f"none; you count {found}"
        )
    for k in range(1, 7):
        node = (
            chain(("many", both), A, *[both] * (k - 1))
            if k > 1
            else ("then", ("many", both), A)
        )
        found = count_states(node, 100)
        assert found == 2**k, (
            f"an a as the letter number {k} from the end takes {2**k} states, and you "
            f"count {found}: go on from new states until there are none"
        )
        assert count_states(node, 2**k) == 2**k, f"{2**k} isn't over {2**k}"
        assert count_states(node, 2**k - 1) is None, (
            "more than most states: then it gives up, and returns None"
        )
    assert count_states(BRACKETS, 200) is None, "brackets have states without end"


def check_B_3(fewest):
    """Against all texts that there are."""
    texts = [b"abc", b"abcde", b"x", b"xyzzy", b"\xff\xfe"]
    automaton = Table(texts)
    for state, prefix in automaton.names.items():
        expected = min(
            len(text) - len(prefix) for text in texts if text.startswith(prefix)
        )
        assert fewest(automaton, state, 9) == expected, (
            f"after {prefix!r} the fewest bytes are {expected}, not "
            f"{fewest(automaton, state, 9)}"
        )
        assert fewest(automaton, state, expected) == expected, (
            f"{expected} bytes aren't over {expected}"
        )
        if expected:
            assert fewest(automaton, state, expected - 1) is None, (
                f"{expected} bytes are over {expected - 1}: None"
            )

    class Ring(Table):
        """In a ring of 50 states, one may end; letters also lead back to the start."""

        def step(self, state, number):
            self.asked.append((state, number))
            assert len(self.asked) < 60_000, (
                "you take the same states again and again: remember those you've seen"
            )
            return {97: (state + 1) % 50, 98: 0, 99: state}.get(number)

        def ends(self, state):
            return state == 49

    assert fewest(Ring([b""]), 0, 100) == 49, "49 bytes lead once around the ring"
    assert fewest(Ring([b""]), 0, 40) is None, "49 bytes are over 40: None"
