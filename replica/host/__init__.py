"""The engine host: a driver behind `sluice.wire.engine.v1`, whatever carries its bytes."""

from replica.host.service import EngineHost, Responder

__all__ = ["EngineHost", "Responder"]
