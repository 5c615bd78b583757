"""The engine host: serves a driver over `sluice.wire.engine.v1`, independent of the transport."""

from replica.host.service import EngineHost, Responder

__all__ = ["EngineHost", "Responder"]
