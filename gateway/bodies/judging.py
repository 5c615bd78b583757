"""Bodies of the requests that judge texts: rerank, classify and moderations. Pure."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from gateway.bodies.fields import Flag, Integer, ModelName, ShortText, Text
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Body, Strict

DOCUMENTS_MAX, TEXTS_MAX, LABELS_MAX = 1_000, 64, 100

_Filled = Annotated[Text, Field(min_length=1)]


class DocumentText(Strict):
    """A text that the client has put into an object."""

    type: Literal["text"] | None = None
    text: _Filled


_TextOrPart: TypeAlias = _Filled | DocumentText
_Texts = Annotated[list[_TextOrPart], Field(fail_fast=True, min_length=1, max_length=TEXTS_MAX)]


class RerankRequest(Body):
    """Documents to be ranked by their relevance to a query, in the form of Jina and Cohere."""

    model: ModelName
    query: _Filled
    documents: Annotated[
        list[_TextOrPart], Field(fail_fast=True, min_length=1, max_length=DOCUMENTS_MAX)
    ]
    top_n: Annotated[Integer, Field(ge=1)] | None = None
    return_documents: Flag | None = None
    user: ShortText | None = None

    @property
    def texts(self) -> list[str]:
        """The query, followed by the documents."""
        return [self.query, *map(text_of, self.documents)]


class ClassifyRequest(Body):
    """Texts to be classified. The labels are the request's (Jina) or else the model's (vLLM)."""

    model: ModelName
    input: _Filled | _Texts
    labels: Annotated[list[ShortText], Field(min_length=2, max_length=LABELS_MAX)] | None = None
    user: ShortText | None = None

    def check(self) -> None:
        """Raise BadRequestError if labels are empty or equal."""
        if self.labels is not None and (len(set(self.labels)) < len(self.labels)):
            raise bad_value("labels", "two labels are equal; send each once")
        if self.labels is not None and not all(it.strip() for it in self.labels):
            raise bad_value("labels", "a label is empty; name each")


class ModerationRequest(Body):
    """Texts to be moderated, in the form of OpenAI."""

    input: _Filled | _Texts
    model: ModelName | None = None


def text_of(given: str | DocumentText) -> str:
    """Return a document's text, which may be the document itself."""
    return given if isinstance(given, str) else given.text


def texts_of(given: str | list[str | DocumentText]) -> list[str]:
    """Return the given texts as a list, even if only one is given."""
    return [given] if isinstance(given, str) else [text_of(it) for it in given]
