"""What can be asked for: bases, and the public names that resolve to them."""

from control_plane.fields import Body, Count, Digest, Id, OptionalDigest, OptionalId, Text


class BaseBody(Body):
    """Weights that nodes hold in their artifact folders, by digest."""

    name: Text = ""
    context_tokens_max: Count


class ModelBody(Body):
    """A public name; `owner_tenant_id` empty means that everybody may use it."""

    base_digest: Digest
    pool_id: Id
    adapter_digest: OptionalDigest = ""
    release: Text = ""
    owner_tenant_id: OptionalId = ""
