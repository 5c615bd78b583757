"""Serves a driver over the protocol `sluice.wire.engine.v1`, independent of the transport."""

from replica.host.service import EngineHost, Responder

__all__ = ["EngineHost", "Responder"]
