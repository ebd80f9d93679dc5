"""A small encoder-decoder Transformer, pre-norm, with sinusoidal positions."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn
from torch.nn import functional

from ckptd_trainer.config import TrainConfig
from ckptd_trainer.vocab import PAD


class Transformer(nn.Module):
    """Token ids in, logits out. Shapes: source [batch, s], target [batch, t], logits [batch, t, words]."""

    def __init__(self, config: TrainConfig, source_words: int, target_words: int) -> None:
        super().__init__()
        width = config.d_model
        self.source_embedding = Embedding(source_words, config)
        self.target_embedding = Embedding(target_words, config)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.output = nn.Linear(width, target_words)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(source), source, decoder_input)

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.source_embedding(source)
        for layer in self.encoder:
            hidden = layer(hidden, _visible(source))
        return self.encoder_norm(hidden)  # type: ignore[no-any-return]

    def decode(self, memory: torch.Tensor, source: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
        """Padding in `decoder_input` stands at its end, where no earlier position looks; it needs no mask."""
        hidden: torch.Tensor = self.target_embedding(decoder_input)
        for layer in self.decoder:
            hidden = layer(hidden, memory, _visible(source))
        return self.output(self.decoder_norm(hidden))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    def __init__(self, words: int, config: TrainConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(words, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.scale = math.sqrt(config.d_model)
        # Computed, not learned: it is no part of a checkpoint.
        self.register_buffer("positions", _positions(config.max_length, config.d_model), persistent=False)
        self.positions: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.words(tokens) * self.scale + self.positions[: tokens.shape[1]]
        return self.dropout(embedded)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key_value = nn.Linear(config.d_model, 2 * config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model)

    def forward(
        self, hidden: torch.Tensor, memory: torch.Tensor, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`visible` [batch, 1, 1, s] marks the positions of `memory` that count; default: all earlier ones."""
        query = self._by_head(self.query(hidden))
        key, value = map(self._by_head, self.key_value(memory).chunk(2, dim=-1))
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=visible is None,
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _by_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view(*hidden.shape[:-1], self.heads, -1).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), _feed_forward(config)
        self.norms = nn.ModuleList(nn.LayerNorm(config.d_model) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.dropout(self.attention(normed, normed, visible))
        return hidden + self.dropout(self.feed_forward(self.norms[1](hidden)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.self_attention, self.cross_attention = Attention(config), Attention(config)
        self.feed_forward = _feed_forward(config)
        self.norms = nn.ModuleList(nn.LayerNorm(config.d_model) for _ in range(3))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.dropout(self.self_attention(normed, normed))
        hidden = hidden + self.dropout(self.cross_attention(self.norms[1](hidden), memory, visible))
        return hidden + self.dropout(self.feed_forward(self.norms[2](hidden)))  # type: ignore[no-any-return]


def weights_digest(model: nn.Module) -> str:
    """sha256 over the model's state, names and types included: equal only for weights equal bit for bit."""
    running = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        running.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        running.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return running.hexdigest()


def _feed_forward(config: TrainConfig) -> nn.Module:
    return nn.Sequential(
        nn.Linear(config.d_model, config.d_feed_forward),
        nn.ReLU(),
        nn.Dropout(config.dropout),
        nn.Linear(config.d_feed_forward, config.d_model),
    )


def _visible(source: torch.Tensor) -> torch.Tensor:
    return (source != PAD)[:, None, None, :]


def _positions(length: int, width: int) -> torch.Tensor:
    position = torch.arange(length).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table = torch.empty(length, width)
    table[:, 0::2], table[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
    return table
