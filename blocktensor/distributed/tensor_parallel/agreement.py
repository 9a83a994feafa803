"""What ranks compare before their first collective of a module, and again if it has changed."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ..compare_ranks import agree


class Agreement:
    """A description of a module that the ranks of a mesh have compared.

    Ranks that disagree would wait for each other's collectives, or read other bytes.
    """

    def __init__(self, what: str, mesh: DeviceMesh) -> None:
        self._what, self._mesh = what, mesh
        self._agreed: tuple[object, ...] = ()

    def check(self, *mine: object) -> None:
        """Compare ``mine``, if it is not what was agreed on.

        Raises:
            RuntimeError: on every rank, if it differs between ranks.
        """
        if mine == self._agreed:
            return
        agree(self._what, [", ".join(map(str, mine))], self._mesh.get_group())
        self._agreed = mine
