"""Grammars of what calls ask for, compiled once: agents send the same ones again."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec

from simplellm.api.chat_options import Constraint
from simplellm.base.config import ParameterError, expect
from simplellm.base.grammar import Grammar, GrammarError
from simplellm.base.sampling_params import StructuredOutputs
from simplellm.structured.compiler import Grammars, refusal
from simplellm.structured.rules import WHERE, rules_text
from simplellm.text.tokenizer import Tokenizer

# What the samples of a call must fit, given its structured_outputs.
Constrain = Callable[[StructuredOutputs | None], Constraint | None]
MAX_GRAMMARS = 64  # that are kept


@dataclass(frozen=True, eq=False)
class GrammarCompiler:
    """Compiles what outputs must fit, for the tokens of one model."""

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    compiler: Callable[[str], Grammar] | None  # another process's; None: its own

    @cached_property
    def local(self) -> Grammars:
        """The compiler of this process."""
        assert self.tokenizer is not None
        return Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    def prepare(self) -> None:
        """Build now what all grammars share, if the model can have any.

        The first grammar would make all running requests wait for it. An error is left
        for that grammar to raise.
        """
        if self.tokenizer is not None and find_spec("llguidance"):
            with suppress(Exception):
                self.local.vocabulary  # noqa: B018  (it is kept)

    @cached_property
    def compile(self) -> Callable[[str], Grammar]:
        """Compile llguidance's text; the grammar is kept. Raises GrammarError."""
        return lru_cache(MAX_GRAMMARS)(self.compile_anew)

    def compile_anew(self, text: str) -> Grammar:
        """Compile llguidance's text, and keep nothing."""
        return (self.compiler or self.local.compile)(text)

    def compile_constraint(self, constraint: Constraint) -> Grammar:
        """The compiled grammar. Raises ValueError that names the part to blame."""
        parts = constraint.parts
        name = " and ".join(parts) or "tool_choice"
        lacks = "token that ends a text" if self.tokenizer else "tokenizer.json"
        ok = self.tokenizer and self.eos_token_ids
        expect(ok, name, "given", f"none: this model has no {lacks}")
        try:
            grammar = self.compile(constraint.text)
            if "lark_grammar" in (outputs := parts.get(WHERE, {})):
                # By itself, too: behind free thoughts, a grammar that no text fits
                # would be noticed too late.
                self.compile(rules_text(outputs))
            return grammar
        except GrammarError as error:
            if constraint.looser is not None:
                return self.compile_constraint(constraint.looser)
            wrong = f"{name}: {error}"
        for part, rules in parts.items():
            if (reason := refusal(rules, self.compile_anew)) is not None:
                name, wrong = part, f"{part}: {reason}"
                break
        raise ParameterError(wrong, name)


def memoized(constrain: Constrain) -> Constrain:
    """``constrain``, which then isn't asked again for what it has been asked before."""
    compiled: list[tuple[StructuredOutputs | None, Constraint | None]] = []

    def remembered(outputs: StructuredOutputs | None) -> Constraint | None:
        for one, constraint in compiled:
            if one is outputs:
                return constraint
        compiled.append((outputs, constrain(outputs)))
        return compiled[-1][1]

    return remembered
