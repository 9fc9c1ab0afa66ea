"""The trainer's reference: plain transformers and torch on one process, each row alone, written without a look at the product.

It follows the papers' formulas over whole mini-batches: nothing here is summed up in parts.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from store import open_store
from store.rows import row_of
from trainer.wire import PlanRow

Arrays = dict[str, np.ndarray]


class Plain:
    """`step` after `step`; what a step left behind is in `arrays`.

    In bf16 it keeps no fp32 weights: its first gradients say what that dtype's rounding does, its later ones nothing.
    """

    def __init__(self, model_path: str, spec: dict[str, Any]) -> None:
        self.spec, self.loss = spec, spec["loss"]
        dtype = getattr(torch, spec["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="eager").train()
        if hasattr(self.model.config, "num_experts"):
            self.model.set_experts_implementation("eager")
        self.frozen = copy.deepcopy(self.model)
        self.forced = force_routes(self.model)
        self.optimizer = self.made(self.model)
        self.critic: Any = None
        if spec["critic"]:
            backbone = AutoModel.from_pretrained(model_path, dtype=dtype, attn_implementation="eager").train()
            head = torch.nn.Linear(backbone.config.hidden_size, 1, bias=False)
            torch.nn.init.zeros_(head.weight)
            self.critic = torch.nn.ModuleDict({"model": backbone, "value_head": head})
            self.critic_optimizer = self.made(self.critic)
        self.arrays: Arrays = {}
        self.steps = 0

    def made(self, model: Any) -> Any:
        """The optimizer of the spec; norms and biases are not decayed."""
        opt = self.spec["optimizer"]
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": opt["weight_decay"]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        if opt["kind"] == "sgd":
            return torch.optim.SGD(groups, lr=0.0, momentum=opt["momentum"])
        return torch.optim.AdamW(groups, lr=0.0, betas=tuple(opt["betas"]), eps=opt["eps"])

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """One global batch. The report is of its last mini-batch."""
        planned = [[row for ranks in mini["ranks"] for micro in ranks for row in micro] for mini in request["mini_batches"]]
        known = {row["row_id"]: self.prepared(row) for mini in planned for row in mini}
        if self.spec["critic"] and self.spec["critic"]["whiten"]:
            every = torch.cat([known[row_id]["advantage"] for row_id in known])
            for facts in known.values():
                facts["advantage"] = (facts["advantage"] - every.mean()) / (every.std(correction=0) + 1e-8)
        report: dict[str, Any] = {}
        for mini in planned:
            report = self.mini_batch([(row, known[row["row_id"]]) for row in mini], request) | self.of_the_batch(list(known.values()))
        named = [(name, p) for name, p in self.named()]
        self.arrays |= {
            f"gradients/{self.steps}/{saved}": a.float().numpy() + 0 for name, p in named for saved, a in as_saved(name, p.grad)
        }
        self.steps += 1
        return report

    def of_the_batch(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The metrics of what was fixed before the first step."""
        kept = {name: torch.cat([facts[name] for facts in rows]).double() for name in rows[0] if name not in ("chosen", "masked")}
        found: dict[str, Any] = {"masked_tokens": sum(facts["masked"] for facts in rows)}
        found["masked_rows"] = sum(facts["masked"] > 0 and not len(facts["chosen"]) for facts in rows)
        if self.loss["old_log_probs"] == "recomputed":
            log_ratio = kept["old"] - kept["behaviour"]
            found["off_policy_kl"] = float((log_ratio.exp() - 1 - log_ratio).mean())
            found["effective_sample_size"] = float(kept["weight"].mean() ** 2 / (kept["weight"] ** 2).mean())
        if self.critic:
            error = kept["returns"] - kept["values"]
            found["explained_variance"] = float(1 - (error**2).mean() / kept["returns"].var(correction=0))
        return found

    def named(self) -> list[tuple[str, torch.Tensor]]:
        own = list(self.model.named_parameters())
        return own + ([(f"critic.{name}", p) for name, p in self.critic.named_parameters()] if self.critic else [])

    def weights(self) -> Arrays:
        return {f"weights/{saved}": a.float().numpy() for name, p in self.named() for saved, a in as_saved(name, p.detach())}

    def mini_batch(self, rows: list[tuple[dict[str, Any], dict[str, Any]]], request: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        per_sequence: dict[str, list[torch.Tensor]] = {}
        entropies, values, kls = [], [], []
        for row, facts in rows:
            log_probs, entropy = self.log_probs(self.model, row, facts["chosen"])
            advantage = facts["advantage"] if self.critic else torch.full_like(log_probs, row["advantage"])
            losses = -self.gain(log_probs, advantage, facts) - self.loss["entropy_bonus"] * entropy
            if self.loss["kl"]["coefficient"]:
                away = log_probs - facts["reference"]
                kl = {"k1": away, "k2": away**2 / 2, "k3": torch.exp(-away) - 1 + away}[self.loss["kl"]["estimator"]]
                kls.append(kl.detach())
                losses = losses + self.loss["kl"]["coefficient"] * kl * (self.loss["kl"]["where"] == "loss")
            name = row["sequence"] if self.loss["sequence"] == "trajectory" else row["row_id"]
            per_sequence.setdefault(name, []).append(losses)
            entropies.append(entropy.detach())
            if self.critic:
                found = self.values(row, facts["chosen"])
                clip = self.spec["critic"]["value_clip"]
                near = facts["values"] + (found - facts["values"]).clip(-clip, clip) if clip else found
                values.append(torch.maximum((found - facts["returns"]) ** 2, (near - facts["returns"]) ** 2) / 2)
        sequences = [torch.cat(parts) for parts in per_sequence.values() if sum(map(len, parts))]
        kind = self.loss["aggregation"]
        if kind == "token_mean":
            loss = torch.cat(sequences).mean()
        elif kind == "constant":
            loss = torch.cat(sequences).sum() / self.loss["divisor"]
        else:
            loss = torch.stack([s.mean() if kind == "sequence_mean_token_mean" else s.sum() for s in sequences]).mean()
        loss.backward()
        clip_norm = self.spec["optimizer"]["grad_clip"]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        apply(self.optimizer, request["lr"])
        tokens = sum(map(len, sequences))
        report = {"loss": float(loss), "grad_norm": float(norm), "entropy": float(torch.cat(entropies).sum()) / tokens, "tokens": tokens}
        if kls:
            report["reference_kl"] = float(torch.cat(kls).mean())
        if self.critic:
            self.critic_optimizer.zero_grad()
            value_loss = torch.cat(values).mean()
            value_loss.backward()
            report["critic_grad_norm"] = float(torch.nn.utils.clip_grad_norm_(self.critic.parameters(), clip_norm))
            apply(self.critic_optimizer, request["critic_lr"])
            report["value_loss"] = float(value_loss)
        return report

    def gain(self, log_probs: torch.Tensor, a: torch.Tensor, facts: dict[str, Any]) -> torch.Tensor:
        """What each token of one row is to gain; GSPO's ratio is the same number at each."""
        log_ratio = log_probs - facts["old"]
        ratio = log_ratio.mean().exp().expand(len(log_ratio)) if self.loss["policy"] == "gspo" else log_ratio.exp()
        bounded = torch.clip(ratio, 1 - self.loss["clip_low"], 1 + self.loss["clip_high"])
        if self.loss["policy"] == "cispo":
            return facts["weight"] * bounded.detach() * a * log_probs
        gain = torch.minimum(ratio * a, bounded * a)
        if self.loss["policy"] == "dual_clip":
            gain = torch.where(a < 0, torch.maximum(gain, self.loss["dual_clip"] * a), gain)
        if self.loss["policy"] == "decoupled_ppo":
            gain = gain * (facts["old"] - facts["behaviour"]).exp()
        return facts["weight"] * gain

    def prepared(self, row: dict[str, Any]) -> dict[str, Any]:
        """With the weights that the batch found: what the losses of a row compare with, at its trained tokens that no mask leaves out."""
        lease = opened(row)
        chosen = torch.tensor(np.flatnonzero(lease["response_mask"]))
        behaviour = torch.tensor(lease["rollout_log_probs"][chosen.numpy()])
        with torch.no_grad():
            now, _ = self.log_probs(self.model, row, None)
            reference = self.log_probs(self.frozen, row, chosen)[0]
            values = self.values(row, chosen) if self.critic else None
        if self.steps == 0:
            self.arrays[f"log_probs/{row['row_id']}"] = now.numpy()
        now = now[chosen]
        facts: dict[str, Any] = {"behaviour": behaviour, "reference": reference}
        facts["old"] = now if self.loss["old_log_probs"] == "recomputed" else behaviour
        k = (now - behaviour).exp()
        correction = self.loss["correction"]
        facts["weight"] = {"none": torch.ones_like(k), "token": k, "sequence": k.prod().expand(len(k))}[correction["weight"]]
        if correction["weight"] != "none" and correction["cap"]:
            facts["weight"] = facts["weight"].clip(max=correction["cap"])
        judged = {"none": None, "token": k, "sequence": k.log().mean().exp().expand(len(k))}[correction["mask"]]
        keep = torch.ones(len(k), dtype=torch.bool) if judged is None else (judged >= correction["low"]) & (judged <= correction["high"])
        if self.critic:
            facts["advantage"], facts["returns"] = self.estimated(row, now, behaviour, reference, values)
            facts["values"] = values
        facts = {name: column[keep] for name, column in facts.items()}
        return facts | {"chosen": chosen[keep], "masked": int((~keep).sum())}

    def estimated(self, row: Any, now: Any, behaviour: Any, reference: Any, values: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(advantages, returns) by the definitions, each a sum over all later tokens."""
        critic, kl, count = self.spec["critic"], self.loss["kl"], len(values)
        rewards = torch.zeros(count)
        if kl["where"] == "reward" and kl["coefficient"]:
            away = now - reference
            rewards -= kl["coefficient"] * {"k1": away, "k2": away**2 / 2, "k3": torch.exp(-away) - 1 + away}[kl["estimator"]]
        rewards[-1] += row["score"]
        gamma, lam = critic["gamma"], critic["lam"]
        after = torch.cat([values[1:], torch.zeros(1)])
        if critic["targets"] == "gae":
            delta = rewards + gamma * after - values
            advantage = torch.stack([sum((gamma * lam) ** (t - s) * delta[t] for t in range(s, count)) for s in range(count)])  # type: ignore[arg-type]
            return advantage, advantage + values
        ratio = (now - behaviour).exp()
        rho, c = ratio.clip(max=critic["rho_cap"]), lam * ratio.clip(max=critic["c_cap"])
        delta = rho * (rewards + gamma * after - values)
        returns = torch.stack(
            [values[s] + sum(gamma ** (t - s) * c[s:t].prod() * delta[t] for t in range(s, count)) for s in range(count)]  # type: ignore[arg-type]
        )
        return rho * (rewards + gamma * torch.cat([returns[1:], torch.zeros(1)]) - values), returns

    def log_probs(self, model: Any, row: dict[str, Any], chosen: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the chosen response positions, or of all."""
        lease = opened(row)
        ids = torch.tensor(lease["input_ids"].astype(np.int64))[None]
        self.forced.clear()
        if self.spec["routing_replay"] and "routed_experts" in lease and len(np.unique(lease["version_spans"][:, :2], axis=0)) == 1:
            routes = torch.tensor(lease["routed_experts"].astype(np.int64))
            first = ids.shape[1] - 1 - len(routes)
            self.forced.update({layer: (first, routes[:, layer]) for layer in range(routes.shape[1])})
        logits = model(ids, use_cache=False).logits[0, :-1].float() / float(lease["temperature"])
        every = logits.log_softmax(-1)
        log_probs, entropy = every.gather(1, ids[0, 1:, None])[:, 0], -(every.exp() * every).sum(-1)
        return (log_probs, entropy) if chosen is None else (log_probs[chosen], entropy[chosen])

    def values(self, row: dict[str, Any], chosen: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor(opened(row)["input_ids"].astype(np.int64))[None]
        hidden = self.critic["model"](ids, use_cache=False).last_hidden_state[0, :-1]
        found: torch.Tensor = self.critic["value_head"](hidden)[chosen, 0]
        return found


def opened(row: dict[str, Any]) -> Any:
    planned = PlanRow(**row)
    columns = row_of(open_store(planned.rollout.location).open(planned.rollout.ref()), planned.row)
    if planned.extras is not None:
        columns |= open_store(planned.extras.location).open(planned.extras.ref())
    return columns


def apply(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def reference(model_path: str, spec: dict[str, Any], requests: list[dict[str, Any]], out: str) -> dict[str, Any]:
    """The same steps in plain torch. Saves log-probs before the first step, the gradients of each, and the weights after the last."""
    torch.set_num_threads(1)
    plain = Plain(model_path, spec)
    reports = [plain.step(request) for request in requests]
    np.savez(out, allow_pickle=False, **plain.arrays, **plain.weights())
    return {"reports": reports}


def force_routes(model: Any) -> dict[int, tuple[int, torch.Tensor]]:
    """The experts of each layer's tokens from a first position on, [tokens, k], for a row to come: the result is to be filled with them."""
    forced: dict[int, tuple[int, torch.Tensor]] = {}

    def choose(layer: int, router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
        chosen = logits.detach().topk(router.top_k, dim=-1).indices
        if layer in forced:
            first, experts = forced[layer]
            chosen[first : first + len(experts)] = experts
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, chosen

    for layer, block in enumerate(model.model.layers):
        if isinstance(router := getattr(block.mlp, "gate", None), Qwen3MoeTopKRouter):
            router.forward = partial(choose, layer, router)  # type: ignore[method-assign]
    return forced


def as_saved(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """In memory transformers has all of a layer's experts in two tensors; in a checkpoint they are one by one."""
    if name.endswith("experts.gate_up_proj"):
        stem, halves = name.removesuffix("gate_up_proj"), [expert.chunk(2) for expert in tensor]
        return [(f"{stem}{i}.{half}_proj.weight", part) for i, parts in enumerate(halves) for half, part in zip(("gate", "up"), parts)]  # noqa: B905
    if name.endswith("experts.down_proj"):
        return [(f"{name.removesuffix('down_proj')}{i}.down_proj.weight", expert) for i, expert in enumerate(tensor)]
    return [(name, tensor)]
