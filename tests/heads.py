"""Tiny checkpoints with a head that drafts, and what transformers' own layers make of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.conftest import LOGIT_NOISE, Reference, fill_randomly, tiny_config

LAST_LAYER: dict[str, dict[str, Any]] = {
    "glm4_moe": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "deepseek_v32": {"first_k_dense_replace": 0},
    "glm_moe_dsa": {"indexer_types": ["full"], "mlp_layer_types": ["sparse"]},
    "qwen3_next": {"layer_types": ["full_attention"], "mlp_only_layers": []},
    "qwen3_5_text": {"layer_types": ["full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["full_attention"]},
    "deepseek_v4": {"compress_ratios": [0], "num_hash_layers": 0},
}
"""Families with heads, and what makes a model of one layer that layer of theirs."""


class HeadReference:
    """The head is a model of one layer, whose last norm is the head's, and around it what the notes on heads say."""

    def __init__(self, reference: Reference, folder: Path, **sizes: Any) -> None:
        self.main, self.folder, self.name = reference.model, folder, reference.name
        config = tiny_config(reference.name, **sizes | LAST_LAYER[reference.name] | {"num_hidden_layers": 1})
        torch.manual_seed(3)
        self.layer = AutoModelForCausalLM.from_config(config).eval()
        fill_randomly(self.layer)
        self.is_hyper = reference.name == "deepseek_v4"
        self.is_qwen = reference.name.startswith("qwen")
        hidden, std = config.hidden_size, 0.15
        mean = 0.0 if self.is_qwen else 1.0
        self.embedded_norm, self.hidden_norm = (mean + std * torch.randn(hidden) for _ in range(2))
        self.join = std * torch.randn(hidden, 2 * hidden)
        self._write(reference.folder)

    def _write(self, source: Path) -> None:
        shutil.copytree(source, self.folder, dirs_exist_ok=True)
        config = json.loads((self.folder / "config.json").read_text())
        layers = config["num_hidden_layers"]
        if not self.is_qwen:
            config["num_nextn_predict_layers"] = 1
        (self.folder / "config.json").write_text(json.dumps(config))
        path = "mtp." if self.is_qwen else "mtp.0." if self.is_hyper else f"model.layers.{layers}."
        own = self.folder / "layer"
        self.layer.save_pretrained(own)
        begins = {
            "model.layers.0.": "mtp.layers.0." if self.is_qwen else path,
            "model.hc_head.hc_": f"{path}hc_head_",
            "model.norm.": path + ("norm." if self.is_qwen or self.is_hyper else "shared_head.norm."),
        }
        tensors = {
            theirs + name.removeprefix(ours): tensor
            for name, tensor in load_file(own / "model.safetensors").items()
            for ours, theirs in begins.items()
            if name.startswith(ours)
        }
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden") if self.is_qwen else ("enorm", "hnorm")
        tensors |= {f"{path}{norms[0]}.weight": self.embedded_norm, f"{path}{norms[1]}.weight": self.hidden_norm}
        if self.is_hyper:
            first, second = self.join.chunk(2, 1)
            tensors |= {f"{path}e_proj.weight": first.contiguous(), f"{path}h_proj.weight": second.contiguous()}
        else:
            tensors[f"{path}{'fc' if self.is_qwen else 'eh_proj'}.weight"] = self.join
        shutil.rmtree(own)
        whole = load_file(self.folder / "model.safetensors") | tensors
        save_file(whole, self.folder / "model.safetensors", metadata={"format": "pt"})

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight + 1.0 if self.is_qwen else weight
        return weight * x * (x.square().mean(-1, keepdim=True) + self.layer.config.rms_norm_eps).rsqrt()

    def _handed_on(self, tokens: list[int]) -> Tensor:
        """What the model makes of each token: behind its last norm, or all of its streams."""
        ids = torch.tensor([tokens])
        if not self.is_hyper:
            return self.main.model(ids).last_hidden_state[0]
        found: list[Tensor] = []
        hook = self.main.model.layers[-1].register_forward_hook(lambda module, args, out: found.append(out))
        self.main.model(ids)
        hook.remove()
        return found[0][0]

    def _run(self, handed: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """What the head hands on of every row, and its logits."""
        embedded = self._normed(self.main.get_input_embeddings()(torch.tensor(tokens)), self.embedded_norm)
        normed = self._normed(handed, self.hidden_norm)
        if not self.is_hyper:
            joined = torch.cat((embedded, normed), -1) @ self.join.T
            state = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0]
            return state, self.main.lm_head(state)
        first, second = self.join.chunk(2, 1)
        streams, found = (embedded @ first.T)[:, None] + normed @ second.T, []
        layer = self.layer.model.layers[0]
        hooks = [
            layer.register_forward_pre_hook(lambda module, args: (streams[None], *args[1:])),
            layer.register_forward_hook(lambda module, args, out: found.append(out)),
        ]
        last = self.layer.model(inputs_embeds=embedded[None]).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return found[0][0], self.main.lm_head(last)

    @torch.inference_mode()
    def scores(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """Logits of each of these drafts behind the tokens, where the head goes on from its own."""
        handed, rows = self._handed_on(tokens[:-1]), tokens[1:]
        found = []
        for draft in drafts:
            state, logits = self._run(handed, rows)
            found.append(logits[-1])
            handed, rows = torch.cat((handed, state[-1:])), [*rows, draft]
        return torch.stack(found)

    def confirms(self, tokens: list[int], drafts: list[int]) -> bool:
        """Whether each draft is the likeliest, as far as last bits do not decide."""
        scores = self.scores(tokens, drafts)
        chosen = scores.gather(1, torch.tensor(drafts)[:, None])[:, 0]
        return bool((scores.amax(-1) - chosen <= LOGIT_NOISE).all())
