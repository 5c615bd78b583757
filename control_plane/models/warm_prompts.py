"""REST of warm prompts, the system prompts that stay in the caches of a model's engines."""

from typing import Annotated

from pydantic import Field
from sqlalchemy import select

from control_plane.access.roles import Action
from control_plane.fields import AdminBody
from control_plane.http.resources import Resource
from control_plane.tables import models, warm_prompts

PROMPTS_MAX = 4  # largest number of prompts per model
CHARACTERS_MAX = 200_000


class WarmPromptsBody(AdminBody):
    """System prompts that stay in the KV cache of each replica for an hour after their last use.

    A request of the model uses a warm prompt if its first message has exactly this text.
    """

    prompts: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=CHARACTERS_MAX)]],
        Field(min_length=1, max_length=PROMPTS_MAX),
    ]


_OWNER = (
    select(models.c.owner_tenant_id)
    .where(models.c.id == warm_prompts.c.id)
    .correlate(warm_prompts)
    .scalar_subquery()
)
WARM_PROMPTS = Resource(
    path="warm-prompts",
    table=warm_prompts,
    shown=("id", *WarmPromptsBody.model_fields),
    # Prompts are as confidential as the words of text policies, so the same roles may read them.
    # Only roles that may write tenants may write prompts, because pinned blocks reduce the cache
    # for all other prompts.
    read=Action.READ_TEXT_POLICIES,
    write=Action.WRITE_TENANTS,
    owner=_OWNER,
    body=WarmPromptsBody,
    hidden=("prompts",),
    body_bytes_max=8 << 20,
    id_pattern=".+",
)
