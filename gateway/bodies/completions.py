"""The body of a text completion, whose prompts are texts or token ids without template. Pure."""

from typing import Annotated, Any

from pydantic import Field

from gateway.bodies.fields import Flag, Integer, Only
from gateway.bodies.generation import GenerationFields
from gateway.bodies.mistakes import bad_value, unsupported
from gateway.bodies.parsing import parse
from gateway.bodies.prompts import TextOrIds, check_ids, listed

PROMPTS_MAX = 64
CHOICES_MAX = 64  # maximum number of answers in one request, over all prompts
LOGPROBS_MAX = 5
_OUTPUT_TOKENS = 16  # OpenAI's default of `max_tokens`


class CompletionRequest(GenerationFields):
    """Prompts to be continued. A field whose value is null counts as absent."""

    prompt: TextOrIds
    max_tokens: Annotated[Integer, Field(ge=0, le=1 << 30)] | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    echo: Flag | None = None
    best_of: Annotated[Integer, Field(ge=1, le=20)] | None = None
    add_special_tokens: Flag | None = None
    suffix: Annotated[Any, Only()] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, at least one."""
        return listed(self.prompt)

    @property
    def output_tokens_max(self) -> int:
        """The bound on the tokens of each answer. The default is OpenAI's, and the minimum is 1."""
        return _OUTPUT_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def is_echo_alone(self) -> bool:
        """Whether only the echoed prompt is shown, because the client has requested no tokens."""
        return self.max_tokens == 0

    @property
    def echoed_alternatives(self) -> int | None:
        """Alternatives to report per token of the echoed prompt, or None for no report."""
        return self.logprobs if self.echo else None

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report per token of the answer, or None for no report."""
        return self.logprobs

    def prompt_param(self, index: int) -> str:
        """Return the name of the body's field for a prompt, by the prompt's index."""
        return f"prompt[{index}]" if len(self.prompts) > 1 else "prompt"

    def check(self) -> None:
        """Raise BadRequestError if there are too many prompts, or if fields exclude each other."""
        super().check()
        prompts = self.prompts
        if len(prompts) > PROMPTS_MAX:
            raise bad_value("prompt", f"{len(prompts)} prompts; at most {PROMPTS_MAX}")
        if len(prompts) * self.choices > CHOICES_MAX:
            raise bad_value(
                "n", f"{len(prompts)} prompts times {self.choices}; at most {CHOICES_MAX} answers"
            )
        if self.best_of not in (None, self.choices):
            raise unsupported("best_of", f"it must equal 'n', {self.choices}")
        if self.is_echo_alone and not self.echo:
            raise bad_value("max_tokens", "0 needs 'echo': true")
        if self.stream and (self.is_echo_alone or self.echoed_alternatives is not None):
            raise unsupported(
                "stream",
                "an 'echo' without output, or with 'logprobs', has no stream; leave it out",
            )
        if self.stream and self.echo and not isinstance(prompts[0], str):
            raise unsupported(
                "echo", "an 'echo' of token ids has no stream; send text, or leave 'stream' out"
            )

    def check_vocabulary(self, size: int) -> None:
        """Raise BadRequestError for a bias or a prompt with a token id of at least `size`."""
        super().check_vocabulary(size)
        for index, prompt in enumerate(self.prompts):
            if not isinstance(prompt, str):
                check_ids(self.prompt_param(index), prompt, size)


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Return the request in `body`, or raise BadRequestError with the name of the wrong field."""
    return parse(CompletionRequest, body)
