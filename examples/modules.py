import torch
from torch import nn
from torch.nn.functional import cross_entropy

import greedysnake as gs


class Embed(nn.Embedding):
    def forward(self, batch):
        return super().forward(batch["ids"])


class Head(nn.Linear):  # returns the loss summed over the batch's tokens
    def forward(self, hidden, batch):
        return cross_entropy(super().forward(hidden).float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def layer():  # any module from hidden to hidden; functions are called block by block, so no model need fit in memory
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


model = gs.Sequential(
    lambda: Embed(256, 64), [layer] * 4, lambda: Head(64, 256), num_targets=lambda batch: batch["labels"].numel()
)
with gs.Engine(model, gs.AdamW(lr=3e-3), storage=["runs/modules"], ram="256MiB", overwrite=True) as engine:
    for step in range(20):
        counting = (torch.randint(256, (8, 4, 1)) + torch.arange(33)) % 256  # 8 micro-batches of 4 sequences
        result = engine.step([{"ids": ids[:, :-1], "labels": ids[:, 1:]} for ids in counting])
        print(
            f"step {step}  loss {result.loss:.3f}  SSD read {result.ssd_read_bytes}, written {result.ssd_write_bytes} B"
        )
    engine.save()  # a checkpoint; continue from it with resume=True instead of overwrite=True
