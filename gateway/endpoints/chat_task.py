"""The task of a chat completion. The route is in `gateway/chat/endpoint.py`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from gateway.auto.board import AskedPrompt
from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bases.prompt_trail import PromptTrail
from gateway.bodies.chat import ChatRequest
from gateway.bodies.guides import lark_of
from gateway.bodies.messages import Message
from gateway.bodies.mistakes import unsupported
from gateway.bodies.truncation import prompt_room
from gateway.dialects.tools import ToolSpec
from gateway.dispatch.generation import WholeGeneration
from gateway.endpoints.task import TextTask
from gateway.endpoints.truncation import fitted
from gateway.resolved import ResolvedModel
from gateway.text.detokenizer import TokenTable
from gateway.text.logprobs import LogprobFormat, LogprobLine, NewLogprobs, chat_logprobs
from gateway.text.pipe import TextPipe
from gateway.text.sse import ChatChunks, StreamHead
from sluice.errors import BadRequestError, ErrorCode
from sluice.ids import new_id
from sluice.scopes import Scope
from sluice.wire.engine.v1 import engine_pb2 as engine

_OTHER_MESSAGE = Message(role="user", content="")


class ChatTask(ChatRequest, TextTask):
    """A chat completion."""

    endpoint = "/v1/chat/completions"
    scope = Scope.CHAT
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    @property
    def trail(self) -> PromptTrail | None:
        """None, because a chat stores no prompt of earlier turns."""
        return None

    async def encoded(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        """Return the only prompt of the chat."""
        effort = self.reasoning_effort
        if effort is not None and not assets.heeds_effort(effort):
            raise unsupported(
                self.effort_param, "this model's chat template takes none; leave it out"
            )
        encode = partial(
            assets.encode_chat,
            tools=self.shown_tools,
            cache_root=resolved.cache_root,
            owner=resolved.tenant_id,
            options=self.template_options,
            context_tokens_max=resolved.context_tokens_max,
            param=self.prompt_param(0),
            trail=self.trail,
        )
        messages, other = self.shown_messages, encode
        encode = partial(encode, session=self.session)
        if self.truncation == "auto" and resolved.context_tokens_max:
            room_tokens = prompt_room(resolved.context_tokens_max, self.output_tokens_max)
            prompt = await fitted(encode, messages, room_tokens)
        else:
            prompt = await encode(messages)
        warm = resolved.warm_prompts
        if warm is not None and messages[0].text() in warm.prompts:
            # The warm part is the beginning that a prompt with another second message shares.
            prompt = prompt.pinned_as(await other([messages[0], _OTHER_MESSAGE]))
        return (prompt,)

    async def predicted(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[int]:
        """Return the token ids of the request's predicted output, empty without a prediction."""
        if self.prediction is None:
            return ()
        text = self.prediction.text
        assets.require_fit(len(text), resolved.context_tokens_max, "prediction")
        encoded = await assets.encode_text(
            text, resolved.cache_root, owner=resolved.tenant_id, add_special_tokens=False
        )
        return encoded.ids

    def asked(self) -> AskedPrompt:
        """Return the words of the whole conversation, with calls and results."""
        said = [it.text() or _calls_of(it) for it in self.messages]
        return AskedPrompt(said, len(self.callable_tools))

    def texts(self, table: TokenTable) -> Iterator[tuple[str, Iterable[object]]]:
        """Yield the messages and the tools, for `gateway.texts.documents`."""
        del table  # a chat has no tokens
        yield "messages", (it.model_dump(exclude_none=True) for it in self.messages)
        yield "tools", (it.model_dump(exclude_none=True) for it in self.functions_told)

    def enforced(self, assets: BaseAssets, prompt: EncodedPrompt) -> engine.Grammar | None:
        """Return the grammar of tool calls and of the text beside them, or None for free output."""
        dialect, guide = assets.dialect, self.guide
        tools = self._tool_specs() if self.tools else ()
        if not tools:
            if guide is None:
                return None
            text = dialect.behind_reasoning(lark_of(guide), is_reasoning=prompt.is_reasoning)
            return None if text is None else _ebnf(text)
        if not dialect.has_tools:
            raise BadRequestError(
                ErrorCode.UNSUPPORTED_PARAMETER,
                "This model cannot call tools: its chat template knows of none.",
                param="tools",
            )
        if self.must_call:
            text = dialect.call_grammar(
                tools, is_parallel=self.is_parallel, is_reasoning=prompt.is_reasoning
            )
        elif guide is not None:
            text = dialect.calls_or_answer(
                tools,
                lark_of(guide),
                is_parallel=self.is_parallel,
                is_reasoning=prompt.is_reasoning,
            )
        elif any(tool.is_strict for tool in tools):
            text = dialect.strict_grammar(tools, is_parallel=self.is_parallel)
        else:
            return None
        if text is None:
            raise BadRequestError(
                ErrorCode.UNSUPPORTED_PARAMETER,
                "This model's free calls cannot be held to a schema: leave 'strict' out, or set "
                "'tool_choice' to \"required\" or a function.",
                param="tools",
            )
        return _ebnf(text)

    def new_pipe(self, assets: BaseAssets, prompt: EncodedPrompt) -> Callable[[], TextPipe]:
        """Return a maker of pipes, which extract calls and reasoning and end at stop strings."""
        names: tuple[str, ...] = ()
        if self.tools:
            names = tuple([tool.function.name for tool in self.callable_tools])
        is_forced = bool(names) and self.must_call
        # a third smaller than a `partial` with keywords, since each stream has one
        return _NewPipe(
            assets, tuple(self.stops), names, self.is_parallel, prompt.is_reasoning, is_forced
        )

    def new_logprobs(self, assets: BaseAssets) -> NewLogprobs | None:
        """Return a maker of a choice's log probabilities, or None if they are not requested."""
        return partial(_logprobs, assets.table) if self.logprobs else None

    def chunks(self, head: StreamHead, index: int) -> ChatChunks:
        """Return the writer of a choice's chunks."""
        return ChatChunks(head, index)

    def choice_of(self, generation: WholeGeneration, reason: str) -> dict[str, object]:
        """Return one choice of a whole answer, with its message, reasoning and tool calls."""
        answer = generation.answer
        calls = answer.calls
        message: dict[str, object] = {
            "role": "assistant",
            "content": (answer.content or None) if calls or self.must_call else answer.content,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": generation.spec.choice,
            "message": message,
            "logprobs": generation.logprobs,
            "finish_reason": reason,
        }

    def _tool_specs(self) -> tuple[ToolSpec, ...]:
        functions = [tool.function for tool in self.callable_tools]
        return tuple([ToolSpec(f.name, f.parameters, bool(f.strict)) for f in functions])


def _calls_of(message: Message) -> str:
    return "".join([it.function.name + it.function.arguments for it in message.tool_calls or ()])


class _NewPipe(NamedTuple):
    """Returns a pipe with the parser of a model's calls and reasoning."""

    assets: BaseAssets
    stops: tuple[str, ...]
    tools: tuple[str, ...]
    is_parallel: bool
    is_reasoning: bool
    is_forced: bool

    def __call__(self) -> TextPipe:
        assets = self.assets
        parser = assets.dialect.parser(
            tools=self.tools,
            is_parallel=self.is_parallel,
            new_call_id=partial(new_id, "call"),
            is_reasoning=self.is_reasoning,
            is_forced=self.is_forced,
        )
        table = assets.table if parser is None else assets.table_for(tools=bool(self.tools))
        return TextPipe(table, self.stops, parser)


def _logprobs(table: TokenTable) -> tuple[LogprobLine, LogprobFormat]:
    return LogprobLine(table.hidden), partial(chat_logprobs, table)


def _ebnf(text: str) -> engine.Grammar:
    return engine.Grammar(kind=engine.Grammar.KIND_EBNF, text=text)
