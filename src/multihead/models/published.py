"""GPT from published weights: the state dicts of transformers' GPT-2 and Llama, renamed and regrouped.

What a checkpoint's tensors can't tell (the number of heads, the base of the rotary frequencies, the norms' epsilon) is
in its config.json, and an argument here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_size, describe
from multihead.rotary import Scaling

if TYPE_CHECKING:
    from multihead.models.gpt import GPT

G = TypeVar("G", bound="GPT")


def from_gpt2(cls: type[G], state_dict: Mapping[str, Tensor], *, heads: int | None = None, norm_eps: float = 1e-5) -> G:
    """A GPT-2 (Radford et al. 2019) from the tensors of transformers' GPT2LMHeadModel or GPT2Model.

    Args:
        cls: `GPT`.
        state_dict: by their names there, with or without "transformer." in front. They are copied, in their dtype.
        heads: H; by default E / 64, as in all that were released.
        norm_eps: of the layer norms.

    Raises:
        ValueError: a tensor is missing, unknown, given twice, without data or of a shape that does not fit.
        TypeError: state_dict is not one, or a tensor's dtype no floating one.
    """
    given = _Given(state_dict, "transformer.", r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask, and its -1e4
    V, E = given.matrix("wte.weight", "vocabulary, E")
    context, _ = given.matrix("wpe.weight", "context, E")
    if heads is None:
        if E % 64:
            raise bad_value("heads", "an int where E is not a multiple of 64", f"None, with E={E}")
        heads = E // 64
    if E % check_size("heads", heads):
        raise bad_value("heads", f"a divisor of E={E}", heads, "Heads share the width evenly.")
    layers, hidden = given.count("h."), given.matrix("h.0.mlp.c_fc.weight", "E, hidden")[1]

    found = {"embedding.weight": given.take("wte.weight", V, E)}
    found["position_embedding.weight"] = given.take("wpe.weight", context, E)
    for i in range(layers):
        theirs, ours = f"h.{i}.", f"blocks.{i}."
        for norm, name in (("ln_1", "attn_norm"), ("ln_2", "mlp_norm")):
            found |= given.linear(f"{theirs}{norm}", f"{ours}{name}", E)
        # Conv1D holds its matrix as (in, out), the other way round than nn.Linear.
        for name, own, rows, columns in (
            ("attn.c_attn", "attn.qkv_proj", 3 * E, E),
            ("attn.c_proj", "attn.out_proj", E, E),
            ("mlp.c_fc", "mlp.up_proj", hidden, E),
            ("mlp.c_proj", "mlp.down_proj", E, hidden),
        ):
            found[f"{ours}{own}.weight"] = given.take(f"{theirs}{name}.weight", columns, rows).T
            found[f"{ours}{own}.bias"] = given.take(f"{theirs}{name}.bias", rows)
    found |= given.linear("ln_f", "norm", E)
    tied = given.head(found, V, E)
    given.check_all_used()
    with torch.random.fork_rng(devices=[]):
        model = cls(
            V, E, layers, heads, hidden=hidden, context=context, position="learned", mlp="gelu_tanh", norm_eps=norm_eps,
            tied=tied,
        )  # fmt: skip
    return _filled(model, found)


def from_llama(
    cls: type[G],
    state_dict: Mapping[str, Tensor],
    *,
    heads: int,
    context: int | None = None,
    rope_theta: float = 10000.0,
    rope_scaling: Scaling | None = None,
    norm_eps: float = 1e-5,
) -> G:
    """A Llama (Touvron et al. 2023) from the tensors of transformers' LlamaForCausalLM or LlamaModel.

    Models of the same form are read too: Mistral within its window, Qwen2 with its biases of q, k and v. The number of
    key/value heads, the head dim, biases and whether the head is tied are seen from the tensors.

    Args:
        cls: `GPT`.
        state_dict: by their names there, with or without "model." in front. They are copied, in their dtype.
        heads: H, `num_attention_heads` of config.json.
        context: `max_position_embeddings`, which is only noted.
        rope_theta: 10000 in Llama 1 and 2, 500000 in Llama 3.
        rope_scaling: `Llama3Scaling(...)` in Llama 3.1 and later.
        norm_eps: `rms_norm_eps`: 1e-5 in Llama 2 and 3, 1e-6 in Llama 1.

    Raises:
        ValueError: a tensor is missing, unknown, given twice, without data or of a shape that does not fit.
        TypeError: state_dict is not one, or a tensor's dtype no floating one.
    """
    check_size("heads", heads)
    given = _Given(state_dict, "model.", r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
    V, E = given.matrix("embed_tokens.weight", "vocabulary, E")
    first = "layers.0.self_attn."
    rows, k_rows = (given.matrix(f"{first}{name}_proj.weight", "rows, E")[0] for name in "qk")
    D = rows // heads
    if not rows or rows % heads or k_rows % D:
        got = f"{rows} rows of q, {k_rows} of k"
        raise bad_value("heads", "the number of query heads, each with an equal share of rows", f"{heads} for {got}")
    layers, hidden = given.count("layers."), given.matrix("layers.0.mlp.gate_proj.weight", "hidden, E")[0]
    qkv_bias, out_bias = given.has(f"{first}q_proj.bias"), given.has(f"{first}o_proj.bias")
    mlp_bias = any(given.has(f"layers.0.mlp.{part}_proj.bias") for part in ("gate", "up", "down"))  # then all have one

    found = {"embedding.weight": given.take("embed_tokens.weight", V, E)}
    for i in range(layers):
        theirs, ours = f"layers.{i}.", f"blocks.{i}."
        found[f"{ours}attn_norm.weight"] = given.take(f"{theirs}input_layernorm.weight", E)
        found[f"{ours}mlp_norm.weight"] = given.take(f"{theirs}post_attention_layernorm.weight", E)
        parts = [
            given.linear(f"{theirs}self_attn.{part}_proj", part, size, E, bias=qkv_bias)
            for part, size in (("q", rows), ("k", k_rows), ("v", k_rows))
        ]
        for end in ("weight", "bias"):
            joined = [tensor for part in parts for name, tensor in part.items() if name.endswith(end)]
            if joined:
                found[f"{ours}attn.qkv_proj.{end}"] = torch.cat(joined)
        found |= given.linear(f"{theirs}self_attn.o_proj", f"{ours}attn.out_proj", E, rows, bias=out_bias)
        for part, *sizes in (("gate", hidden, E), ("up", hidden, E), ("down", E, hidden)):
            name = f"mlp.{part}_proj"
            found |= given.linear(f"{theirs}{name}", f"{ours}{name}", *sizes, bias=mlp_bias)
    found["norm.weight"] = given.take("norm.weight", E)
    tied = given.head(found, V, E)
    given.check_all_used()
    with torch.random.fork_rng(devices=[]):
        model = cls(
            V, E, layers, heads, kv_heads=k_rows // D, head_dim=D, hidden=hidden, context=context, mlp="swiglu",
            rope_theta=rope_theta, rope_scaling=rope_scaling, norm="rms", norm_eps=norm_eps, tied=tied,
            bias=mlp_bias, attn_bias=qkv_bias, out_bias=out_bias,
        )  # fmt: skip
    return _filled(model, found)


class _Given:
    """The tensors of a checkpoint, and which of them have been used.

    Args:
        state_dict: the checkpoint.
        prefix: what may stand before each name but the head's.
        ignored: a pattern of names, after the prefix, that hold no weights.
    """

    def __init__(self, state_dict: object, prefix: str, ignored: str) -> None:
        if not isinstance(state_dict, Mapping):
            raise bad_type("state_dict", "a dict of tensors by name", state_dict, "", "Pass model.state_dict().")
        self.full: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in state_dict.items():
            if not isinstance(name, str):
                raise bad_type("state_dict", "a dict of tensors by name", name, "It is the name of one.")
            if not isinstance(tensor, Tensor):
                raise bad_type(f"state_dict[{name!r}]", "a tensor", tensor)
            short = name.removeprefix(prefix)
            if short in self.full:
                got = f"{self.full[short]!r} and {name!r}"
                raise bad_value("state_dict", f"each tensor once, with {prefix!r} in front or without", got)
            self.full[short], self.tensors[short] = name, tensor.detach()
        self.prefix, self.used = prefix, {name for name in self.tensors if re.fullmatch(ignored, name)}

    def has(self, name: str) -> bool:
        return name in self.tensors

    def find(self, name: str) -> Tensor:
        """A tensor that must be there."""
        if name not in self.tensors:
            expected = f"the tensor {name!r} (with {self.prefix!r} in front or not)"
            raise bad_value(
                "state_dict", expected, f"{len(self.tensors)} others", "", "Is it of another kind of model?"
            )
        return self.tensors[name]

    def matrix(self, name: str, axes: str) -> tuple[int, int]:
        """The shape of a matrix that sizes are read from."""
        shape = self.find(name).shape
        if len(shape) != 2:
            raise bad_value(f"state_dict[{self.full[name]!r}]", f"the shape ({axes})", tuple(shape))
        return shape[0], shape[1]

    def count(self, prefix: str) -> int:
        """How many blocks there are, by the highest number after `prefix`."""
        found = [re.match(rf"{re.escape(prefix)}(\d+)\.", name) for name in self.tensors]
        return 1 + max((int(match[1]) for match in found if match), default=0)

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor that must be there, of this shape, whose numbers can be copied."""
        tensor = self.find(name)
        argument = f"state_dict[{self.full[name]!r}]"
        if tensor.shape != shape:
            raise bad_value(argument, f"the shape {shape}", describe(tensor))
        if not tensor.is_floating_point():
            raise bad_type(argument, "a floating dtype", tensor, "", "Undo quantisation first.")
        if tensor.is_meta:
            raise bad_value(argument, "a tensor with data", "one on the meta device", "", "Read its numbers first.")
        self.used.add(name)
        return tensor

    def linear(self, name: str, own: str, *shape: int, bias: bool = True) -> dict[str, Tensor]:
        """The weight of a linear map or a norm, and its bias, as `own`."""
        found = {f"{own}.weight": self.take(f"{name}.weight", *shape)}
        return found | ({f"{own}.bias": self.take(f"{name}.bias", shape[0])} if bias else {})

    def head(self, found: dict[str, Tensor], vocabulary: int, width: int) -> bool:
        """Whether the head is tied to the embedding: it is not there, or the same. Another is put to `found`."""
        if not self.has("lm_head.weight"):
            return True
        head = self.take("lm_head.weight", vocabulary, width)
        if torch.equal(head, found["embedding.weight"]):
            return True
        found["head.weight"] = head
        return False

    def check_all_used(self) -> None:
        """Raises where there is a tensor that the model has no place for."""
        left = sorted(self.full[name] for name in self.tensors if name not in self.used)
        if left:
            got = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            instead = "Is it of another kind of model?"
            raise bad_value("state_dict", "no other tensors than the model's", got, "They would be lost.", instead)


def _filled(model: G, found: dict[str, Tensor]) -> G:
    """The model with a copy of the tensors found, in the dtype and on the device of its embedding."""
    embedding = found["embedding.weight"]
    model.to(embedding.device, embedding.dtype).load_state_dict(found)
    return model
