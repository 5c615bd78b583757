"""The policy of the model name `auto` for a tenant, in the form that admins write. Pure."""

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from control_plane.fields import AdminBody, Count, Id, Text
from sluice.auto.features import CLUSTERS, SCHEME
from sluice.auto.published import PUBLISHED

CANDIDATES_MAX = 16
CELLS_MAX = CLUSTERS * CANDIDATES_MAX
# largest request body in bytes, which fits a policy with a full table of cells
BODY_BYTES_MAX = 256 << 10
_PRICE_MAX = 1e9
_JUDGEMENTS_MAX = 1e9

Price = Annotated[float, Field(ge=0, le=_PRICE_MAX, allow_inf_nan=False)]
UnitShare = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _known_row(name: str) -> str:
    if name and name not in PUBLISHED:
        raise ValueError(f"no published figures of {name}; known: {', '.join(sorted(PUBLISHED))}")
    return name


class AutoModelBody(AdminBody):
    """A model that `auto` may choose. Prices are per million tokens.

    `published` names a row of published results, from which the estimate of the model's quality
    begins. Without this row, `quality` is the operator's estimate. Without a `cached_price`, cached
    tokens cost as much as other prompt tokens.
    """

    model: Id
    prompt_price: Price = 0.0
    cached_price: Price | None = None
    output_price: Price = 0.0
    published: Annotated[str, AfterValidator(_known_row)] = ""
    quality: UnitShare = 0.0


class AutoCellBody(AdminBody):
    """The numbers of good and bad answers of one model in one cluster of prompts."""

    cluster: Annotated[int, Field(ge=0, lt=CLUSTERS)]
    model: Id
    release: Text = ""
    good: Annotated[float, Field(ge=0, le=_JUDGEMENTS_MAX, allow_inf_nan=False)]
    bad: Annotated[float, Field(ge=0, le=_JUDGEMENTS_MAX, allow_inf_nan=False)]


class AutoPolicyBody(AdminBody):
    """The models that `auto` may choose from for a tenant, and the weights of the choice.

    `price_max` bounds the expected cost of one request's tokens, and `quality_min` is the least
    quality (0 to 1). `second_price` is the price of a second of waiting, and `miss_price` is the
    price of a bad answer. `explored_share` is the share of new conversations with a random choice.
    Tiers with a priority of at least `queue_priority_min` wait for a saturated pool. `pin` names
    the one model that answers all requests. `cells` count the judged answers by cluster and model.
    `scheme` is the version of the clusters to which they refer.
    """

    candidates: Annotated[list[AutoModelBody], Field(min_length=1, max_length=CANDIDATES_MAX)]
    price_max: Price = 0.0
    quality_min: UnitShare = 0.0
    second_price: Price = 0.0
    miss_price: Price = 0.0
    explored_share: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.01
    queue_priority_min: Count = 0
    pin: str = ""
    scheme: Count = SCHEME
    cells: Annotated[
        list[AutoCellBody], Field(max_length=CELLS_MAX, default_factory=list[AutoCellBody])
    ]

    @model_validator(mode="after")
    def _fits_together(self) -> "AutoPolicyBody":
        names = [it.model for it in self.candidates]
        if len(set(names)) < len(names):
            raise ValueError("candidates: a model is named twice; name each once")
        if self.pin and self.pin not in names:
            raise ValueError(f"pin: {self.pin} is no candidate; add it, or pin another model")
        if self.cells and self.scheme != SCHEME:
            raise ValueError(
                f"scheme: this table was learned under scheme {self.scheme}, this release has"
                f" {SCHEME}: its clusters mean other prompts. Learn it anew: sluice auto learn"
            )
        return self
