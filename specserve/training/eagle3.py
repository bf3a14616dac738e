"""An EAGLE-3 head in training (2503.01840): the public format's arithmetic, unrolled.

Training-time test: a step that begins at place r first reads the target's state and then, depth by
depth, its own output in place of it, while the text's tokens follow (a wrong guess ends a step, so
deeper guesses only ever follow right ones). At depth k it sees the rows of the target's states up
to its root, and its own rows since: exactly what `eagle3.py` of the drafters sees.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.models.config import ModelConfig
from specserve.training.layers import Params, Turn, heads, mlp, norm, random_matrix
from specserve.training.lessons import Lesson
from specserve.training.students import ALL, Deep, Guesses
from specserve.training.vocabulary import known_flags, offsets

START_SPREAD = 1.5
ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"


class Eagle3Shape(msgspec.Struct, frozen=True, kw_only=True):
    """layer: of the one layer; its vocab_size is the target's

    fc_norm, norm_output: EAGLE 3.1's norms before the fusion and on what is fed back
    """

    layer: ModelConfig
    hidden_layers: tuple[int, ...]
    draft_vocab_size: int
    num_depths: int
    fc_norm: bool = True
    norm_output: bool = True


class Eagle3Student:
    kind = "eagle3"
    reads_itself = True

    def __init__(
        self, shape: Eagle3Shape, params: Params, target_ids: Tensor, embedding: Tensor
    ) -> None:
        """target_ids [W] ascending; embedding [V, D], the target's, frozen."""
        self.shape = shape
        self.params = params
        self.target_ids = target_ids
        self.hidden_layers = shape.hidden_layers
        self.num_depths = shape.num_depths
        self._embedding = embedding
        self._dtype = params["norm.weight"].dtype
        self._turn = Turn(shape.layer, self._dtype)

    # ---- forward -------------------------------------------------------------------------

    def guesses(self, lesson: Lesson, deep: Deep = ALL) -> Iterator[Guesses]:
        """Places are packed: products see no padding, only attention to the text does."""
        assert lesson.states is not None
        num_rows = lesson.token_ids.shape[1] - 1  # T - 1 pairs (state at t, token at t + 1)
        fused = self.fuse(lesson.states[:, :num_rows])
        mixed, residual = self._mixed(fused, lesson.token_ids[:, 1:])
        rows = torch.arange(num_rows, device=fused.device)
        context = Context(*self._keys_values(mixed, rows.expand(len(fused), -1)))
        documents, roots = lesson.places(0)  # [n] each: the place a step begins at
        at = lesson.starts[documents] - 1 + roots  # [n] its row
        mixed, residual = mixed[documents, at], residual[documents, at]
        feedback = residual  # not yet: at depth 0 the target's own states are read
        own: list[tuple[Tensor, Tensor]] = []
        for depth in range(min(self.num_depths, lesson.answers.shape[1])):
            if depth:
                goes_on = roots + depth < lesson.num_places[documents]
                if depth == 1:
                    goes_on &= (roots + deep.phase) % deep.every == 0
                documents, roots, at = documents[goes_on], roots[goes_on], at[goes_on]
                own = [(key[goes_on], value[goes_on]) for key, value in own]
                token_ids = lesson.token_ids[documents, at + depth + 1]
                mixed, residual = self._mixed(feedback[goes_on], token_ids)
                own.append(self._keys_values(mixed, at + depth))
            queries = self._heads(mixed, "q", at + depth)
            seen = context.attend(queries, documents, roots, at, own)
            output = residual + F.linear(seen, self.params[f"{ATTENTION}.o_proj.weight"])
            normed = self._norm(output, "midlayer.post_attention_layernorm")
            output = output + mlp(normed, self.params, MLP)
            normed = self._norm(output, "norm")
            feedback = normed if self.shape.norm_output else output
            logits = F.linear(normed, self.params["lm_head.weight"])
            yield Guesses(depth, documents, roots + depth, logits)

    def fuse(self, states: Tensor) -> Tensor:
        """[B, T, A, D] -> [B, T, H']"""
        parts = list(states.unbind(2))
        if self.shape.fc_norm:
            parts = [self._norm(part, f"fc_norm.{idx}") for idx, part in enumerate(parts)]
        fused = F.linear(torch.cat(parts, dim=-1).to(self._dtype), self.params["fc.weight"])
        return fused.to(self._dtype)

    def _mixed(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """h [..., H'], tokens [...] -> ([..., 2H'] what attention reads, [..., H'] residual)"""
        embedded = F.embedding(token_ids, self._embedding).to(self._dtype)
        embedded = self._norm(embedded, "midlayer.input_layernorm")
        return torch.cat([embedded, self._norm(hidden, "midlayer.hidden_norm")], dim=-1), hidden

    def _keys_values(self, mixed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = self.shape.layer.head_dim
        values = heads(mixed, self.params, f"{ATTENTION}.v_proj", size)
        return self._heads(mixed, "k", positions), values

    def _heads(self, mixed: Tensor, name: str, positions: Tensor) -> Tensor:
        """[..., 2H'] at positions [...] -> turned queries or keys [..., heads, H]"""
        size = self.shape.layer.head_dim
        return self._turn(heads(mixed, self.params, f"{ATTENTION}.{name}_proj", size), positions)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.params[f"{name}.weight"], self.shape.layer.rms_norm_eps)

    # ---- the public format ---------------------------------------------------------------

    def config(self) -> dict[str, object]:
        layer = self.shape.layer
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": layer.hidden_size,
            "intermediate_size": layer.intermediate_size,
            "num_attention_heads": layer.num_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": layer.vocab_size,
            "draft_vocab_size": self.shape.draft_vocab_size,
            "max_position_embeddings": layer.max_position_embeddings,
            "rms_norm_eps": layer.rms_norm_eps,
            "rope_theta": layer.rope.theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(self.shape.hidden_layers),
            "fc_norm": self.shape.fc_norm,
            "norm_output": self.shape.norm_output,
        }

    def constants(self) -> dict[str, Tensor]:
        return {
            "d2t": offsets(self.target_ids),
            "t2d": known_flags(self.target_ids, self.shape.layer.vocab_size),
        }


class Context:
    """Keys and values [B, T, G, H] of the rows made of the target's states."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys = keys.permute(0, 2, 3, 1)  # [B, G, H, T]
        self._values = values.transpose(1, 2)  # [B, G, T, H]

    def attend(
        self,
        queries: Tensor,  # [n, N, H]
        documents: Tensor,  # [n]
        roots: Tensor,  # [n] place in its document
        at: Tensor,  # [n] the last row of the text that a query sees
        own: list[tuple[Tensor, Tensor]],  # keys and values [n, G, H] of each query's own chain
    ) -> Tensor:  # [n, N*H]
        """The text by whole documents, the chains query by query, and the two shares joined."""
        num_docs, groups, size, num_rows = self._keys.shape
        wide = queries.view(len(queries), groups, -1, size) * size**-0.5  # [n, G, fold, H]
        fold = wide.shape[2]
        most = int(roots.max()) + 1 if len(roots) else 1
        grid = wide.new_zeros(num_docs, most, groups, fold, size)
        grid = grid.index_put((documents, roots), wide)
        packed = grid.transpose(1, 2).reshape(num_docs, groups, most * fold, size)
        scores = (packed @ self._keys).to(queries.dtype).view(num_docs, groups, most, fold, -1)
        last = at.new_zeros(num_docs, most).index_put((documents, roots), at)
        hidden = torch.arange(num_rows, device=at.device) > last[..., None]  # [B, R, T]
        scores = scores.masked_fill(hidden[:, None, :, None], -torch.inf)
        mass = torch.logsumexp(scores, dim=-1, keepdim=True)  # [B, G, R, fold, 1]
        share = torch.exp(scores - mass).view(num_docs, groups, most * fold, num_rows)
        text = (share @ self._values).to(queries.dtype).view(num_docs, groups, most, fold, size)
        text, mass = (part.transpose(1, 2)[documents, roots] for part in (text, mass))
        chain = [(wide * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]
        weights = torch.softmax(torch.cat([mass, *chain], dim=-1), dim=-1)  # [n, G, fold, 1 + d]
        seen = weights[..., :1] * text
        for idx, (_, value) in enumerate(own):
            seen = seen + weights[..., idx + 1, None] * value[:, :, None]
        return seen.reshape(len(queries), -1)


def new_eagle3_params(
    shape: Eagle3Shape, head: Tensor, final_norm: Tensor, generator: torch.Generator
) -> Params:
    """fp32. The head begins as the target's own rows [W, D] and its norm as the target's [D]: what
    is fed back is then of the target's kind, and the fusion begins as its highest state. The norm
    is scaled down until the logits of a random state spread over START_SPREAD nats: at the target's
    own scale a head that knows nothing yet is sure of it (demo model, 20 steps of 1,024 tokens:
    loss 19.5, first overlap .27; scaled by 1/4: 13.0 and .30).
    """
    final_norm, head = final_norm.detach().float(), head.detach().float()
    spread = (head * final_norm).norm(dim=1).mean()
    layer, num_levels = shape.layer, len(shape.hidden_layers)
    width, inner = layer.hidden_size, layer.intermediate_size
    query, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return random_matrix(generator, rows, columns, scale)

    fc = matrix(width, num_levels * width, 0.1)
    fc[:, -width:] += torch.eye(width)
    params = {
        "fc.weight": fc,
        f"{ATTENTION}.q_proj.weight": matrix(query, 2 * width),
        f"{ATTENTION}.k_proj.weight": matrix(kv, 2 * width),
        f"{ATTENTION}.v_proj.weight": matrix(kv, 2 * width),
        f"{ATTENTION}.o_proj.weight": matrix(width, query, 0.5),
        f"{MLP}.gate_proj.weight": matrix(inner, width),
        f"{MLP}.up_proj.weight": matrix(inner, width),
        f"{MLP}.down_proj.weight": matrix(width, inner, 0.5),
        "midlayer.hidden_norm.weight": torch.ones(width),
        "midlayer.input_layernorm.weight": torch.ones(width),
        "midlayer.post_attention_layernorm.weight": torch.ones(width),
        "norm.weight": final_norm * (START_SPREAD / spread).clamp(max=1),
        "lm_head.weight": head.clone(),
    }
    if shape.fc_norm:
        params |= {f"fc_norm.{idx}.weight": torch.ones(width) for idx in range(num_levels)}
    return params
