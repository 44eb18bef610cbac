"""A recurrent network with CTC: samples of other lengths, and three tensors in the targets."""

import torch
from torch import nn


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, bidirectional=True)
        self.last = nn.Linear(32, 12)

    def forward(self, sounds):
        hidden, _ = self.lstm(sounds.transpose(0, 1))
        return self.last(hidden).log_softmax(2)  # [T, n, 12]


torch.manual_seed(0)
model = Listener()
sounds, words = torch.randn(24, 40, 8), torch.randint(1, 12, (24, 7))
heard, said = torch.randint(20, 41, (24,)), torch.randint(1, 8, (24,))
criterion = nn.CTCLoss(zero_infinity=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for step in range(6):
    optimizer.zero_grad()
    loss = criterion(model(sounds), words, heard, said)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
