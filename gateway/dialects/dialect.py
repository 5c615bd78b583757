"""The syntax in which a model family writes tool calls and reasoning. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.dialects.call_grammar import CallGrammar
from gateway.dialects.delta import OutputParser
from gateway.dialects.forms import CALL_MARKS, REASONING_MARKS, CallForm, ReasoningForm
from gateway.dialects.hermes import HermesParser
from gateway.dialects.llama import LlamaParser
from gateway.dialects.mistral import MistralParser
from gateway.dialects.reasoning import ReasoningParser
from gateway.dialects.tools import ToolSpec


@dataclass(frozen=True, slots=True)
class Dialect:
    """The dialect of a base, which consists of its forms of tool calls and of reasoning.

    Attributes:
        calls: Form of the tool calls.
        reasoning: Form that separates reasoning from the answer.
        mark_ids: Token ids of those marks that are one token of the vocabulary.
    """

    calls: CallForm = CallForm.HERMES
    reasoning: ReasoningForm = ReasoningForm.NONE
    mark_ids: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def name(self) -> str:
        """Name of the dialect in logs and metrics."""
        return f"{self.calls}/{self.reasoning}"

    @property
    def has_tools(self) -> bool:
        """Whether the base can call tools. If not, requests with tools are refused."""
        return self.calls is not CallForm.NONE

    def marks(self, *, tools: bool) -> frozenset[str]:
        """Return the marks that a parser needs as text, although they may be special tokens."""
        calls = CALL_MARKS[self.calls] if tools else ()
        return frozenset((*calls, *REASONING_MARKS.get(self.reasoning, ())))

    def parser(
        self,
        *,
        tools: Collection[str],
        is_parallel: bool,
        new_call_id: Callable[[], str],
        is_reasoning: bool = False,
        is_forced: bool = False,
    ) -> OutputParser | None:
        """Return a parser for one answer, or None if all of the answer is content.

        Args:
            tools: Names of the functions that may be called. If empty, calls are text.
            is_parallel: Whether the answer may have more than one call.
            new_call_id: Returns a new id for each call.
            is_reasoning: Whether the answer begins inside the reasoning. See `opens_reasoning`.
            is_forced: Whether a grammar allows only calls after reasoning. See `call_grammar`.
        """
        calls = None
        if tools:
            calls = self._call_parser(
                tools, new_call_id, is_parallel=is_parallel, is_forced=is_forced
            )
        marks = REASONING_MARKS.get(self.reasoning)
        if marks is None:
            return calls
        return ReasoningParser(marks, calls, is_open=is_reasoning, is_forced=is_forced)

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a prompt ends with the mark that opens reasoning, as in some templates."""
        marks = REASONING_MARKS.get(self.reasoning)
        return marks is not None and prompt.rstrip().endswith(marks.opening)

    def call_grammar(
        self, tools: Sequence[ToolSpec], *, is_parallel: bool, is_reasoning: bool = False
    ) -> str:
        """Return a grammar that allows only calls of `tools`, in the engine's Lark.

        Args:
            tools: Tools that may be called, at least one.
            is_parallel: Whether the answer may have more than one call.
            is_reasoning: Whether the answer begins inside the reasoning. See `opens_reasoning`.
        """
        assert self.has_tools, "this dialect has no calls"
        return self._grammar.forced(tools, is_parallel=is_parallel, is_reasoning=is_reasoning)

    def strict_grammar(self, tools: Sequence[ToolSpec], *, is_parallel: bool) -> str | None:
        """Return a grammar of any text in which calls of `tools` match their schemas.

        The result is None if the dialect's calls begin without a mark, or with a mark that is not a
        single token.
        """
        assert self.has_tools, "this dialect has no calls"
        return self._grammar.guided(tools, is_parallel=is_parallel)

    def behind_reasoning(self, answer: str, *, is_reasoning: bool) -> str | None:
        """Return a grammar of reasoning that is followed by `answer`, a grammar in Lark.

        The result is None if the dialect has no reasoning, so that the output is only the answer.
        """
        if self.reasoning is ReasoningForm.NONE:
            return None
        return self._grammar.behind_reasoning(answer, is_reasoning=is_reasoning)

    def calls_or_answer(
        self, tools: Sequence[ToolSpec], answer: str, *, is_parallel: bool, is_reasoning: bool
    ) -> str:
        """Return a grammar that allows either calls of `tools` or `answer`, a grammar in Lark.

        Args:
            tools: Tools that may be called, at least one. Their schemas are enforced.
            answer: Grammar of an output without calls.
            is_parallel: Whether the answer may have more than one call.
            is_reasoning: Whether the answer begins inside the reasoning. See `opens_reasoning`.
        """
        assert self.has_tools, "this dialect has no calls"
        return self._grammar.calls_or_answer(
            tools, answer, is_parallel=is_parallel, is_reasoning=is_reasoning
        )

    @property
    def _grammar(self) -> CallGrammar:
        return CallGrammar(self.calls, self.mark_ids, REASONING_MARKS.get(self.reasoning))

    def _call_parser(
        self,
        tools: Collection[str],
        new_call_id: Callable[[], str],
        *,
        is_parallel: bool,
        is_forced: bool,
    ) -> OutputParser | None:
        match self.calls:
            case CallForm.HERMES:
                return HermesParser(new_call_id, is_parallel=is_parallel, is_forced=is_forced)
            case CallForm.LLAMA_JSON | CallForm.LLAMA_PYTHONIC:
                return LlamaParser(
                    new_call_id,
                    is_parallel=is_parallel,
                    names=frozenset(tools),
                    is_forced=is_forced,
                )
            case CallForm.MISTRAL | CallForm.MISTRAL_NAMED:
                return MistralParser(new_call_id, is_parallel=is_parallel, is_forced=is_forced)
            case CallForm.NONE:
                return None
