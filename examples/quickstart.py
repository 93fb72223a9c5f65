import torch

import greedysnake as gs

sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
model = gs.load_model({"model_type": "llama", "num_hidden_layers": 4, **sizes})  # or the folder of a model
with gs.Engine(model, gs.AdamW(lr=1e-2), storage=["runs/quickstart"], ram="256MiB", overwrite=True) as engine:
    for step in range(20):
        counting = (torch.randint(256, (8, 4, 1)) + torch.arange(32)) % 256  # 8 micro-batches of 4 rows
        result = engine.step([{"input_ids": ids, "labels": ids} for ids in counting])
        print(f"step {step}  loss {result.loss:.3f}  SSD bytes {result.ssd_read_bytes + result.ssd_write_bytes}")
    engine.save()  # a checkpoint; continue from it with resume=True instead of overwrite=True
