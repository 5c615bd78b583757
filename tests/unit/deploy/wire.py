"""What the last release said over the wire, and whether this one still understands it.

`python -m tests.unit.deploy.wire` writes `proto/last_release.binpb` anew, from the commit that
`migrations/last_release` names: do it when a release is out.
"""

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[3]
BASELINE = ROOT / "proto" / "last_release.binpb"
# Of Triton, not ours: the last release had a copy of them.
_TRITONS = "sluice.wire.kserve.v2"
_WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"


def compiled(folder: Path) -> FileDescriptorSet:
    """Return the descriptors of all definitions in a folder, and of what they import."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        options = [f"-I{folder}", f"-I{_WELL_KNOWN}", "--include_imports"]
        status = protoc.main(["protoc", *options, f"--descriptor_set_out={out.name}", *files])
        assert status == 0, f"protoc ended with {status}"
        return FileDescriptorSet.FromString(Path(out.name).read_bytes())


def breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> Iterator[str]:
    """Yield what a process of the old release would misread, or miss, one line each."""
    messages, enums, services = _named(new)
    old_messages, old_enums, old_services = _named(old)
    for name, message in old_messages.items():
        if name in messages:
            yield from _of_message(name, message, messages[name])
        elif name not in _used(old) or name in _used(new):  # else it went with its fields
            yield f"{name}: the message is gone"
    for name, enum in old_enums.items():
        if name in enums:
            yield from _of_enum(name, enum, enums[name])
        else:
            yield f"{name}: the enum is gone"
    for name, service in old_services.items():
        if name in services:
            yield from _of_service(name, service, services[name])
        else:
            yield f"{name}: the service is gone"


def _used(files: FileDescriptorSet) -> set[str]:
    """Return the messages that fields have, unless a call takes or answers them."""
    messages, _, services = _named(files)
    fields = {field.type_name[1:] for message in messages.values() for field in message.field}
    calls = [method for service in services.values() for method in service.method]
    return fields - {it.input_type[1:] for it in calls} - {it.output_type[1:] for it in calls}


_Named = tuple[
    dict[str, DescriptorProto], dict[str, EnumDescriptorProto], dict[str, ServiceDescriptorProto]
]


def _named(files: FileDescriptorSet) -> _Named:
    messages: dict[str, DescriptorProto] = {}
    enums: dict[str, EnumDescriptorProto] = {}
    services: dict[str, ServiceDescriptorProto] = {}

    def look(prefix: str, message: DescriptorProto) -> None:
        name = f"{prefix}.{message.name}"
        messages[name] = message
        enums.update({f"{name}.{enum.name}": enum for enum in message.enum_type})
        for inner in message.nested_type:
            look(name, inner)

    for file in files.file:
        if file.package == _TRITONS:
            continue
        for message in file.message_type:
            look(file.package, message)
        enums.update({f"{file.package}.{enum.name}": enum for enum in file.enum_type})
        services.update({f"{file.package}.{it.name}": it for it in file.service})
    return messages, enums, services


def _of_message(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in new.field}
    for field in old.field:
        now = fields.get(field.number)
        if now is None:
            if not any(it.start <= field.number < it.end for it in new.reserved_range):
                yield f"{name}.{field.name}: number {field.number} is gone, and not reserved"
        elif (was := _meaning(old, field)) != (meant := _meaning(new, now)):
            yield f"{name}.{field.name}: number {field.number} was {was}, is {meant}"
    for taken in old.reserved_range:
        for number in set(range(taken.start, taken.end)) & fields.keys():
            yield f"{name}.{fields[number].name}: number {number} was reserved"


def _meaning(message: DescriptorProto, field: FieldDescriptorProto) -> tuple[object, ...]:
    """Return what both sides must agree on. Names count: some messages are kept as JSON."""
    choice = ""
    if field.HasField("oneof_index") and not field.proto3_optional:
        choice = message.oneof_decl[field.oneof_index].name
    is_repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    kind = FieldDescriptorProto.Type.Name(field.type)
    return field.name, kind, field.type_name, is_repeated, choice


def _of_enum(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    values = {value.number: value.name for value in new.value}
    for value in old.value:
        if value.number not in values:
            if not any(it.start <= value.number <= it.end for it in new.reserved_range):
                yield f"{name}.{value.name}: {value.number} is gone, and not reserved"
        elif values[value.number] != value.name:
            yield f"{name}.{value.name}: {value.number} is {values[value.number]} now"


def _of_service(
    name: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto
) -> Iterator[str]:
    methods = {method.name: method for method in new.method}
    for method in old.method:
        now = methods.get(method.name)
        if now is None:
            yield f"{name}.{method.name}: the method is gone"
        elif now != method:
            yield f"{name}.{method.name}: takes, answers or streams something else now"


def main() -> None:
    """Write the baseline from the commit of the last release."""
    commit = (ROOT / "migrations" / "last_release").read_text().split()[0]
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "proto"], check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        found = compiled(Path(folder) / "proto")
    BASELINE.write_bytes(found.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
