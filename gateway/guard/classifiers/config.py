"""Reads the classifiers of a gateway from the operator's file, and checks the file at the start."""

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.guard.classifiers.http import HttpClassifier
from gateway.guard.classifiers.protocol import Classifier
from gateway.guard.classifiers.shipped import ShippedClassifier
from gateway.guard.classifiers.triton import TritonClassifier
from sluice.settings import Address

CLASSIFIERS_MAX = 20
SHIPPED = "shipped"


class ClassifierEntry(BaseModel):
    """A classifier in the operator's file.

    Attributes:
        name: Name, for rules and for `model` of `/v1/moderations`.
        kind: Protocol of the classifier.
        url: Address of OpenAI's moderation form, for HTTP.
        key_file: File with the bearer token, for HTTP.
        model: Name of the model, which an HTTP classifier receives in each request.
        address: `host:port` of gRPC, for Triton.
        categories: Names of the columns of `scores`, for Triton.
        timeout_ms: Longest wait in milliseconds for a score, in the queue and on the wire.
        batch_texts: Maximum number of texts in one request.
        in_flight: Maximum number of concurrent requests of one worker.
        queue_texts: Maximum number of waiting texts. Further texts are not judged.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    kind: Literal["shipped", "http", "triton"]
    url: Annotated[str, Field(pattern=r"^$|^https?://[^\s]+$", max_length=2000)] = ""
    key_file: Path | None = None
    model: Annotated[str, Field(max_length=200)] = ""
    address: Address | None = None
    categories: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    timeout_ms: Annotated[int, Field(ge=10, le=30_000)] = 1_000
    batch_texts: Annotated[int, Field(ge=1, le=256)] = 16
    in_flight: Annotated[int, Field(ge=1, le=64)] = 2
    queue_texts: Annotated[int, Field(ge=1, le=10_000)] = 512

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.kind == "http" and not self.url:
            raise ValueError("http wants `url`")
        if self.kind == "triton" and not (self.address and self.model and self.categories):
            raise ValueError("triton wants `address`, `model` and `categories`")
        return self

    def make(self) -> Classifier:
        """Return the classifier, or raise ClassifiersError if its key file cannot be read."""
        if self.kind == "http":
            return HttpClassifier(self.url, model=self.model, key=_key(self.key_file))
        if self.kind == "triton":
            return TritonClassifier(str(self.address), self.model, self.categories)
        return ShippedClassifier()


class ClassifiersError(ValueError):
    """The classifiers' file is invalid. The message names the invalid field, but never a key."""


def read_classifiers(file: Path | None) -> tuple[ClassifierEntry, ...]:
    """Return the classifiers of a JSON file.

    The shipped classifier is one of them, unless the file replaces it.

    Raises:
        ClassifiersError: The file cannot be read, or is not a list of classifiers with unique
            names.
    """
    entries = [] if file is None else _entries(file)
    found = [_entry(entry, f"{file}: {number}") for number, entry in enumerate(entries)]
    names = {it.name for it in found}
    if len(names) < len(found):
        raise ClassifiersError(f"{file}: two classifiers have one name")
    if SHIPPED not in names:
        found.append(ClassifierEntry(name=SHIPPED, kind="shipped"))
    return tuple(found)


def _entries(file: Path) -> list[object]:
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ClassifiersError(f"{file}: {error}") from None
    if not isinstance(entries, list) or len(entries) > CLASSIFIERS_MAX:
        raise ClassifiersError(f"{file}: want a list of at most {CLASSIFIERS_MAX} classifiers")
    return entries


def _entry(entry: object, where: str) -> ClassifierEntry:
    try:
        return ClassifierEntry.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ClassifiersError(f"{where}.{place}: {first['msg']}") from None


def _key(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ClassifiersError(f"{file}: {error.strerror}") from None
