"""POST /v1/chat/completions."""

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bodies.chat import ChatRequest, parse_chat_request
from gateway.dialects.delta import CallDelta, Delta
from gateway.dialects.hermes import ToolCallParser
from gateway.directory import Directory, ResolvedModel
from gateway.dispatch.generation import Generation
from gateway.dispatch.streamed import LogprobFormat
from gateway.endpoints.completer import Completer
from gateway.server.body import read_body
from gateway.server.middleware import authenticate
from gateway.text.logprobs import chat_logprobs
from gateway.text.pipe import TextPipe
from gateway.text.sse import ChatChunks, StreamHead
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
        chat = parse_chat_request(await read_body(request))
        return await self._completer.answer(request, principal, _ChatTask(chat))


class _Parser:
    def __init__(self) -> None:
        self._parser = ToolCallParser(lambda: new_id("call"))
        self._told = 0

    is_complete = is_plain = False

    @property
    def has_calls(self) -> bool:
        return bool(self._parser.calls)

    def _delta(self, text: str) -> Delta:
        calls = self._parser.calls[self._told :]
        deltas = [
            CallDelta(self._told + i, c.arguments, c.call_id, c.name) for i, c in enumerate(calls)
        ]
        self._told += len(calls)
        return Delta(text, "", tuple(deltas))

    def push(self, text: str) -> Delta:
        return self._delta(self._parser.push(text))

    def flush(self) -> Delta:
        return self._delta(self._parser.flush())


class _ChatTask:
    """One chat completion."""

    endpoint = "/v1/chat/completions"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    prompt_param = "messages"

    __slots__ = ("fields",)

    def __init__(self, fields: ChatRequest) -> None:
        self.fields = fields

    async def prompts(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        chat = self.fields
        prompt = await assets.encode_chat(chat.messages, chat.shown_tools, resolved.cache_root)
        return (prompt,)

    def grammar(self, assets: BaseAssets) -> engine.Grammar | None:
        return None

    def pipe(self, assets: BaseAssets, prompt: EncodedPrompt) -> TextPipe:
        chat = self.fields
        parser = _Parser() if chat.shown_tools else None
        return TextPipe(assets.table.stream(), chat.stops, parser)

    def chunks(self, head: StreamHead, index: int) -> ChatChunks:
        return ChatChunks(head, index)

    def logprob_format(self, assets: BaseAssets) -> LogprobFormat | None:
        return partial(chat_logprobs, assets.table) if self.fields.logprobs else None

    def choice(
        self, assets: BaseAssets, index: int, generation: Generation, reason: str
    ) -> dict[str, object]:
        answer = generation.answer
        calls = answer.calls
        message: dict[str, object] = {
            "role": "assistant",
            "content": (answer.content or None) if calls else answer.content,
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
