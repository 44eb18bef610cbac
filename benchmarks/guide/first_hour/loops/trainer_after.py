"""The same GPT-2 in a Trainer."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from anybatch.integrations.transformers import Trainer

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

arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=48,
    max_steps=6,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
    seed=0,
)
trainer = Trainer(model, arguments, train_dataset=rows, memory="6MiB")
trainer.train()
for step, log in enumerate(one for one in trainer.state.log_history if "loss" in one):
    print(f"step {step} loss {float(log['loss']):.6f}")
