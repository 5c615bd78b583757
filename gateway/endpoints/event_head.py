"""The head of an event. It has the fields that similar requests share, and is serialized once.

Concatenated protobuf messages parse as one message. So an event is the shared head, followed by the
fields of the single request.
"""

from gateway.directory import Principal
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

_SCHEMA_VERSION = 1
# Maximum number of heads per caller, of about 0.6 kB each. At the bound all heads are dropped.
_HEADS_MAX = 64


def head_of(
    principal: Principal,
    model: control.Model,
    requested_model: str,
    endpoint: str,
    is_stream: bool,
    gateway_id: str,
) -> bytes:
    """Return the head of events, shared by requests with the same fields.

    The cache compares principal and model by object identity, because a change always creates a new
    object. The cache belongs to the principal and ends with it.
    """
    heads = principal.event_heads
    place = (id(model), requested_model, endpoint, is_stream, gateway_id)
    found = heads.get(place)
    if found is not None:
        return found[0]
    head = RequestEvent(
        schema_version=_SCHEMA_VERSION,
        tenant_id=principal.tenant.id,
        key_id=principal.key.id,
        tier_id=principal.tier.id,
        model=model.id,
        requested_model=requested_model,
        release=model.release,
        base_digest=model.base_digest,
        adapter_digest=model.adapter_digest,
        pool_id=model.pool_id,
        gateway_id=gateway_id,
        endpoint=endpoint,
        is_stream=is_stream,
    ).SerializeToString()
    if len(heads) >= _HEADS_MAX:
        heads.clear()
    heads[place] = (head, model)  # the reference keeps the model's id() from being reused
    return head
