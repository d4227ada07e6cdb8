"""A small vision transformer (Dosovitskiy et al., 2021) with layer norm, for 32 x 32 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup_lab.models.initialise import initialise, initialise_narrow

TOKENS = (32 // 4) ** 2
WIDTH, DEPTH, HEADS, EXPANSION = 192, 8, 6, 2


class ViT(nn.Module):
    """Images (batch, `channels`, 32, 32) to logits (batch, `classes`), through 64 tokens.

    Three small convolutions without a norm make the tokens (Xiao et al., 2021): cut into bare patches, 50,000 images
    are too few to learn from. The classifier reads the mean of all tokens; there is no class token. 2.6 million
    parameters.
    """

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, WIDTH // 4, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(WIDTH // 4, WIDTH // 2, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(WIDTH // 2, WIDTH, 3, stride=2, padding=1),
        )
        self.positions = nn.Parameter(torch.empty(1, TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(TransformerBlock() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, classes)
        initialise_narrow(self)
        initialise(self.stem)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.fc(self.norm(self.blocks(tokens)).mean(dim=1))
        return logits


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each preceded by a norm and bypassed by a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, EXPANSION * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(EXPANSION * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = self.down(self.act(self.up(self.norm2(x))))
        return x + out


class Attention(nn.Module):
    """Multi-head self-attention over tokens (batch, tokens, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        taken = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        out: Tensor = self.out(taken.transpose(1, 2).flatten(2))
        return out
