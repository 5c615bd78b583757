"""The shapes of files, batches and stored completions, which only the API's description uses."""

from typing import Literal

from gateway.endpoints.answers import ChatCompletion, Count, Shape


class FileObject(Shape):
    """A file of a tenant."""

    id: str
    object: Literal["file"]
    created_at: Count
    filename: str
    purpose: Literal["batch", "batch_output"]
    bytes: Count
    status: Literal["uploaded", "processed", "error"]


class FileList(Shape):
    """One page of a tenant's files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Shape):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchMistake(Shape):
    """An error in the input file of a batch."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchMistakes(Shape):
    """All errors in the input file of a batch."""

    object: Literal["list"]
    data: list[BatchMistake]


class RequestCounts(Shape):
    """The progress of a batch."""

    total: Count
    completed: Count
    failed: Count


class BatchObject(Shape):
    """A batch of requests."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchMistakes | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: Count
    expires_at: Count
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str]


class BatchList(Shape):
    """One page of a tenant's batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompletionList(Shape):
    """One page of a tenant's stored chat completions."""

    object: Literal["list"]
    data: list[ChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedCompletion(Shape):
    """A deleted chat completion."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]
