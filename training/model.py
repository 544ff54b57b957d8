"""← yours: build_model(settings) returns the module that is trained.

The contract: the module takes one batch, as `data.py` makes it, and returns its mean loss, a
scalar. This one is a decoder-only transformer over bytes, so that any file is training text and
the same code runs from a hundred thousand parameters to a billion.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.sampling import derive_seed
from training.settings import TrainingSettings

BYTES = 256


def build_model(settings: TrainingSettings) -> nn.Module:
    """The model at step 0: the same on every rank and at every start."""
    torch.manual_seed(derive_seed("model", settings.seed))
    return ByteTransformer(settings)


class ByteTransformer(nn.Module):
    """Predicts the next byte (GPT-2's architecture: pre-norm blocks, learned positions)."""

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__()
        width = settings.model_width
        self.token = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(settings.sequence_length, width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(
            Block(width, settings.model_heads, settings.dropout)
            for _ in range(settings.model_depth)
        )
        self.norm = nn.LayerNorm(width)
        self.apply(_initialise)

    @property
    def tokens_per_sample(self) -> int:
        """For the log; a model need not have it."""
        return self.position.num_embeddings

    @property
    def flops_per_sample(self) -> float:
        """Of a forward and backward pass (PaLM, Chowdhery et al. 2022, appendix B); for the log."""
        multiplied = sum(p.numel() for p in self.parameters()) - self.position.weight.numel()
        length, width = self.position.weight.shape
        return length * (6.0 * multiplied + 12.0 * len(self.blocks) * width * length)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of `targets` given `inputs`, both (batch, length)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.token(inputs) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        # The embedding is the output head too: one tensor, so one name in the snapshot.
        logits = functional.linear(self.norm(x), self.token.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.drop_probability = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        x = x + self.dropout(self.project(self._attention(self.norm1(x))))
        hidden = functional.gelu(self.expand(self.norm2(x)))
        mixed: Tensor = x + self.dropout(self.contract(hidden))
        return mixed

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attend(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.drop_probability if self.training else 0.0,
            is_causal=True,
        )
        return mixed.transpose(1, 2).reshape(batch, length, width)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
