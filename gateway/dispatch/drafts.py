"""Sums of speculated tokens over attempts and answers. Pure."""

from sluice.wire.engine.v1 import engine_pb2 as engine


def summed(before: engine.Drafts | None, later: engine.Drafts | None) -> engine.Drafts | None:
    """Return the sum as a new message, since a reference would keep the parent message alive."""
    if later is None:
        return before
    before = before or engine.Drafts()
    return engine.Drafts(
        tried=before.tried + later.tried,
        accepted=before.accepted + later.accepted,
        prediction_tried=before.prediction_tried + later.prediction_tried,
        prediction_accepted=before.prediction_accepted + later.prediction_accepted,
    )
