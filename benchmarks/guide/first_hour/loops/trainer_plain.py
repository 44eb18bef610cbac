"""The Trainer's steps as a plain loop, with the loss of the model."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=500,
    n_positions=32,
    n_embd=32,
    n_layer=2,
    n_head=2,
    attn_pdrop=0.0,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
)
model = GPT2LMHeadModel(config)
rows = []
for length in torch.randint(4, 32, (48,)).tolist():
    tokens = torch.randint(500, (32,))
    rows.append({"input_ids": tokens, "labels": tokens.where(torch.arange(32) < length, -100)})

batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
for step in range(6):
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    print(f"step {step} loss {loss.item():.6f}")
