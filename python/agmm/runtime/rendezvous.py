"""How many rendezvous of symmetric memory this process has made, as far as agmm sees: its own, and
those of the workspaces that torch's ops make for themselves."""

from __future__ import annotations

import torch.distributed._symmetric_memory as symm_mem


class Rendezvous:
    def __init__(self) -> None:
        self.count = 0
        self.failed = ""
        """Why one of agmm's own failed; empty where none did."""
        self._sizes: dict[str, int] = {}  # last seen, of torch's workspaces by the group's name

    def note_torchs(self) -> None:
        """Counts those that torch's own ops have made since the last time: one for each workspace
        that is new or larger. To be called after each of these ops that agmm calls."""
        for name, workspace in getattr(symm_mem, "_group_name_to_workspace_tensor", {}).items():
            if workspace is not None and self._sizes.get(name) != workspace.numel():
                self._sizes[name] = workspace.numel()
                self.count += 1


made = Rendezvous()
