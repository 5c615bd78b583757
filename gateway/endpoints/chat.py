"""POST /v1/chat/completions."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from aiohttp import web

from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bodies.chat import ChatRequest, parse_chat_request
from gateway.bodies.guides import lark_of
from gateway.bodies.mistakes import unsupported
from gateway.dialects.tools import ToolSpec
from gateway.directory import Directory, ResolvedModel
from gateway.dispatch.generation import WholeGeneration
from gateway.dispatch.streamed import LogprobFormat
from gateway.endpoints.completer import Completer
from gateway.endpoints.reading import read_parsed
from gateway.server.middleware import authenticate
from gateway.text.logprobs import chat_logprobs
from gateway.text.pipe import TextPipe
from gateway.text.sse import ChatChunks, StreamHead
from sluice.errors import BadRequestError, ErrorCode
from sluice.ids import new_id
from sluice.scopes import Scope
from sluice.wire.engine.v1 import engine_pb2 as engine


class ChatCompletions:
    """The endpoint."""

    def __init__(self, directory: Directory, completer: Completer) -> None:
        """Compose."""
        self._directory = directory
        self._completer = completer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        task = _ChatTask(await read_parsed(request, parse_chat_request))
        return await self._completer.answer(request, principal, task)


class _ChatTask:
    """One chat completion."""

    endpoint = "/v1/chat/completions"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    __slots__ = ("_is_forced", "_is_parallel", "_stops", "_tools", "fields", "param_names")

    def __init__(self, fields: ChatRequest) -> None:
        self.fields = fields
        self.param_names = fields.param_names
        self._stops, self._is_parallel = tuple(fields.stops), fields.is_parallel
        self._is_forced = fields.must_call
        functions = [tool.function for tool in fields.callable_tools]
        self._tools = tuple([ToolSpec(f.name, f.parameters, bool(f.strict)) for f in functions])

    async def prompts(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        chat = self.fields
        effort = chat.reasoning_effort
        if effort is not None and not assets.heeds_effort(effort):
            raise unsupported(
                "reasoning_effort", "this model's chat template takes none; leave it out"
            )
        prompt = await assets.encode_chat(
            chat.shown_messages,
            chat.shown_tools,
            resolved.cache_root,
            owner=resolved.tenant_id,
            options=chat.template_options,
            context_tokens_max=resolved.context_tokens_max,
        )
        return (prompt,)

    def forget_request(self) -> None:
        del self.fields

    def copied(self) -> "_ChatTask":
        return _ChatTask(self.fields)

    def texts(self, assets: BaseAssets) -> Iterator[tuple[str, Iterable[object]]]:  # noqa: ARG002 - a chat has no tokens
        yield "messages", (it.model_dump(exclude_none=True) for it in self.fields.messages)
        yield "tools", (it.model_dump(exclude_none=True) for it in self.fields.tools or ())

    def grammar(self, assets: BaseAssets, prompt: EncodedPrompt) -> engine.Grammar | None:
        chat, dialect = self.fields, assets.dialect
        if not self._tools:
            if chat.guide is None:
                return None
            text = dialect.behind_reasoning(lark_of(chat.guide), is_reasoning=prompt.is_reasoning)
            return None if text is None else _ebnf(text)
        if not dialect.has_tools:
            raise BadRequestError(
                ErrorCode.UNSUPPORTED_PARAMETER,
                "This model cannot call tools: its chat template knows of none.",
                param="tools",
            )
        if chat.must_call:
            text = dialect.call_grammar(
                self._tools, is_parallel=chat.is_parallel, is_reasoning=prompt.is_reasoning
            )
        elif chat.guide is not None:
            text = dialect.calls_or_answer(
                self._tools,
                lark_of(chat.guide),
                is_parallel=chat.is_parallel,
                is_reasoning=prompt.is_reasoning,
            )
        elif any(tool.is_strict for tool in self._tools):
            text = dialect.strict_grammar(self._tools, is_parallel=chat.is_parallel)
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

    def pipe(self, assets: BaseAssets, prompt: EncodedPrompt) -> TextPipe:
        parser = assets.dialect.parser(
            tools=[tool.name for tool in self._tools],
            is_parallel=self._is_parallel,
            new_call_id=partial(new_id, "call"),
            is_reasoning=prompt.is_reasoning,
            is_forced=self._is_forced,
        )
        table = assets.table if parser is None else assets.table_for(tools=bool(self._tools))
        return TextPipe(table, self._stops, parser)

    def chunks(self, head: StreamHead, index: int) -> ChatChunks:
        return ChatChunks(head, index)

    def logprob_format(self, assets: BaseAssets) -> LogprobFormat | None:
        return partial(chat_logprobs, assets.table) if self.fields.logprobs else None

    def choice(
        self, assets: BaseAssets, index: int, generation: WholeGeneration, reason: str
    ) -> dict[str, object]:
        answer = generation.answer
        calls = answer.calls
        message: dict[str, object] = {
            "role": "assistant",
            "content": (answer.content or None) if calls or self._is_forced else answer.content,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = chat_logprobs(assets.table, answer.logprobs) if self.fields.logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
        }


def _ebnf(text: str) -> engine.Grammar:
    return engine.Grammar(kind=engine.Grammar.KIND_EBNF, text=text)
