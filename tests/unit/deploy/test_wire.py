"""Old and new processes side by side: the definitions against those of the last release."""

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from tests.unit.deploy.wire import BASELINE, ROOT, breaks, compiled


def last_release() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(BASELINE.read_bytes())


def test_the_last_release_understands_this_one() -> None:
    assert not list(breaks(last_release(), compiled(ROOT / "proto")))


def test_the_baseline_has_all_of_our_definitions() -> None:
    packages = {file.package for file in last_release().file}
    assert {"sluice.wire.router.v1", "sluice.wire.engine.v1", "sluice.wire.control.v1"} <= packages


def changed(change: Callable[[FileDescriptorSet], None]) -> list[str]:
    new = last_release()
    change(new)
    return list(breaks(last_release(), new))


def first_message(files: FileDescriptorSet):
    return next(
        message for file in files.file for message in file.message_type if len(message.field) > 1
    )


def test_an_added_field_breaks_nothing() -> None:
    def add(files: FileDescriptorSet) -> None:
        field = first_message(files).field.add(name="added", number=9999)
        field.type = FieldDescriptorProto.TYPE_BOOL

    assert not changed(add)


def test_a_number_that_is_reserved_may_go() -> None:
    def remove(files: FileDescriptorSet) -> None:
        message = first_message(files)
        number = message.field.pop(0).number
        message.reserved_range.add(start=number, end=number + 1)

    assert not changed(remove)


def test_a_message_may_go_with_the_last_field_of_its_type() -> None:
    old, new = last_release(), last_release()
    for files in (old, new):
        message = first_message(files)
        message.nested_type.add(name="Gone").field.add(name="a", number=1)
        field = message.field.add(name="gone", number=9999)
        package = next(it.package for it in files.file if message in it.message_type)
        field.type_name = f".{package}.{message.name}.Gone"
    del first_message(new).nested_type[-1]
    assert any("Gone: the message is gone" in line for line in breaks(old, new))
    first_message(new).field.pop()
    first_message(new).reserved_range.add(start=9999, end=10000)
    assert not list(breaks(old, new))


def _retype(files: FileDescriptorSet) -> None:
    field = first_message(files).field[0]
    is_text = field.type == FieldDescriptorProto.TYPE_STRING
    field.type = FieldDescriptorProto.TYPE_INT32 if is_text else FieldDescriptorProto.TYPE_STRING


def _repeat(files: FileDescriptorSet) -> None:
    field = first_message(files).field[0]
    is_many = field.label == FieldDescriptorProto.LABEL_REPEATED
    field.label = (
        FieldDescriptorProto.LABEL_OPTIONAL if is_many else FieldDescriptorProto.LABEL_REPEATED
    )


def _renumber_value(files: FileDescriptorSet) -> None:
    next(enum for file in files.file for enum in file.enum_type).value[-1].number += 100


def _forget_method(files: FileDescriptorSet) -> None:
    del next(it for file in files.file for it in file.service).method[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda files: first_message(files).field.pop(0),
        lambda files: setattr(first_message(files).field[0], "number", 9999),
        lambda files: setattr(first_message(files).field[0], "name", "renamed"),
        lambda files: setattr(first_message(files), "name", "Renamed"),
        _retype,
        _repeat,
        _renumber_value,
        _forget_method,
    ],
)
def test_a_breaking_change_is_reported(change: Callable[[FileDescriptorSet], None]) -> None:
    assert changed(change)


def test_a_reserved_number_is_not_used_again() -> None:
    old, new = last_release(), last_release()
    first_message(old).reserved_range.add(start=9999, end=10000)
    field = first_message(new).field.add(name="added", number=9999)
    field.type = FieldDescriptorProto.TYPE_BOOL
    assert any("was reserved" in line for line in breaks(old, new))
