"""The host's own processor, which `Device` answers for as it is."""

from __future__ import annotations

from dovetail.contracts.device import Device


class HostDevice(Device):
    """See `Device`."""
