"""Checkpoints that survive crashes, other numbers of ranks and other frameworks.

    checkpoint.save("run", model, optimizer, step=step, extra={"scheduler": scheduler.state_dict()}, keep=3)

    if checkpoint.latest("run") is not None:
        restored = checkpoint.load("run", model, optimizer)
        scheduler.load_state_dict(restored.extra["scheduler"])

A checkpoint is a folder that torch.distributed.checkpoint can read, with a checksum of every file. It is written beside,
and gets its name when it is complete; one that is incomplete or damaged is refused. Loading executes nothing that is in it.
"""

from shardstep.checkpoint._export import export
from shardstep.checkpoint._load import Restored, latest, load
from shardstep.checkpoint._save import Saving, save

__all__ = ["Restored", "Saving", "export", "latest", "load", "save"]
