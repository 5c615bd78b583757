"""Channels to processes of the installation under test."""

import grpc.aio

from sluice.channels import Options, channel_to
from sluice.identity import CertificateRole


def trusted_channel(
    address: str, *, role: CertificateRole = CertificateRole.CONTROL_PLANE, options: Options = ()
) -> grpc.aio.Channel:
    """Return a channel whose calls show that they are the installation's."""
    return channel_to(address, role, options=options)
