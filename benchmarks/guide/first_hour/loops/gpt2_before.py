"""A small GPT-2 with padded labels."""

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
tokens = torch.randint(500, (48, 32))
labels = tokens.clone()
for row, length in enumerate(torch.randint(4, 32, (48,))):
    labels[row, length:] = -100
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(6):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
