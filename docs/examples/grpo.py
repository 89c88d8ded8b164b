"""GRPO with three rewards on a small language model, one backward per step: python docs/examples/grpo.py.

A prompt is five different digits, `38164=`. A good completion lists them all in any order and then gives the two
largest in brackets, the larger first: `13468[86]`. The rewards differ in scale and sparsity, and at first they pull
apart: a model that repeats itself covers more digits only by writing more, and is shorter with one digit in brackets.

`marble` balances the gradients of the three. The two others are the ways in which TRL's GRPOTrainer makes one advantage
of several rewards (`multi_objective_aggregation`). docs/examples/grpo_report.py compares them.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from statistics import mean

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from gradbalance import AffineLoss, MarbleOptimizer

REWARDS = ("answer", "coverage", "brevity")
RANGES = torch.tensor([[0.0, 0.0, -0.3], [1.0, 5.0, 0.0]])  # least and greatest of each
OPEN, CLOSE, END, EQUALS = 10, 11, 12, 13  # tokens; 0 … 9 are the digits
DIGITS, PROMPT, BUDGET, LONGEST = 5, 6, 10, 16  # tokens of a task, of a prompt, free of charge, at most
PROMPTS, GROUP, EPOCHS, CLIP = 32, 8, 2, (0.2, 0.28)  # per rollout, per prompt, uses of a rollout, DAPO's range


# --- The task ---------------------------------------------------------------------------------------------------------


def all_prompts():
    """Every prompt, in two parts: to train on, and held out."""
    digits = torch.tensor(list(itertools.permutations(range(10), DIGITS)))
    digits = digits[torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))]
    prompts = functional.pad(digits, (0, 1), value=EQUALS)
    return prompts[1024:], prompts[:1024]


def completion_mask(completions):
    """The tokens up to the first END, which counts."""
    end = completions == END
    return end.cumsum(1) - end.long() == 0


def score(prompts, completions):
    """The three rewards, shape (3, N); they look at the text, never at the model."""
    mask = completion_mask(completions)
    text = functional.pad(completions.masked_fill(~mask, END), (0, 4), value=END)
    position = torch.arange(text.shape[1])
    opened = torch.where(text == OPEN, position, LONGEST).amin(1, keepdim=True)
    two_largest = prompts[:, :DIGITS].topk(2).values
    right = functional.pad(functional.pad(two_largest, (1, 0), value=OPEN), (0, 1), value=CLOSE)
    answer = (text.gather(1, opened + torch.arange(4)) == right).all(1)  # 0 or 1, rarely 1 at first
    found = (text[:, None] == prompts[:, :DIGITS, None]) & (position < opened)[:, None]
    coverage = found.any(2).sum(1)  # 0 … 5: how many of the digits stand before the bracket
    too_long = (mask.sum(1) - BUDGET).clamp(min=0)  # 0 … 6, a small price for each
    return torch.stack([answer.float(), coverage.float(), -0.05 * too_long])


def demonstrations(prompts):
    """What the model imitates before it sees a reward: the form, with arbitrary digits and any length."""
    n, position = len(prompts), torch.arange(LONGEST)
    own = prompts[:, :DIGITS].gather(1, torch.randint(DIGITS, (n, LONGEST)))
    text = torch.where(torch.rand(n, LONGEST) < 0.5, own, torch.randint(10, (n, LONGEST)))
    opened = torch.randint(2, LONGEST - 4, (n, 1))
    closed = opened + torch.randint(2, 4, (n, 1))  # around one digit or two
    two = torch.rand(n, DIGITS).argsort(1)[:, :2]
    text.scatter_(1, opened + torch.tensor([1, 2]), prompts.gather(1, two).sort(1, descending=True).values)
    text = text.masked_fill(position == opened, OPEN).masked_fill(position == closed, CLOSE)
    return text.masked_fill(position > closed, END)


# --- The model --------------------------------------------------------------------------------------------------------


def build_model():
    """A Llama of 84 000 parameters."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": END}
    return LlamaForCausalLM(LlamaConfig(vocab_size=14, max_position_embeddings=PROMPT + LONGEST, **shape, **special))


def log_probabilities(model, prompts, completions):
    """Log π of each token of the completions, shape (N, T)."""
    logits = model(torch.cat([prompts, completions], 1)).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, completions[:, :, None]).squeeze(-1)


def sample(model, prompts):
    """One completion of each prompt, shape (N, LONGEST), filled up with END."""
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": LONGEST}
    text = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)[:, PROMPT:]
    return functional.pad(text, (0, LONGEST - text.shape[1]), value=END)


def warm_start(model, prompts, steps):
    """Supervised imitation of the demonstrations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = prompts[torch.randint(len(prompts), (128,))]
        completions = demonstrations(batch)
        loss = -log_probabilities(model, batch, completions)[completion_mask(completions)].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate(model, prompts):
    """Mean rewards, their mean on their ranges, and how often all three are at their best."""
    rewards = score(prompts, sample(model, prompts)).T
    scaled = (rewards - RANGES[0]) / (RANGES[1] - RANGES[0])
    values = {"overall": scaled.mean(), "perfect": (scaled == 1).all(1).float().mean()}
    values |= dict(zip(REWARDS, rewards.mean(0), strict=True))
    return {name: round(value.item(), 4) for name, value in values.items()}


# --- From rewards to losses -------------------------------------------------------------------------------------------


def normalise(rewards):
    """Rewards (K, N) relative to their group of completions of one prompt: mean 0, standard deviation 1."""
    groups = rewards.unflatten(1, (-1, GROUP))
    return ((groups - groups.mean(2, keepdim=True)) / (groups.std(2, keepdim=True) + 1e-4)).flatten(1)


def advantages(rewards, method):
    """K advantages to balance, or one in either of TRL's ways (trl/trainer/grpo_trainer.py, all reward weights 1)."""
    if method == "marble":
        return normalise(rewards)
    if method == "sum_then_normalise":  # "sum_then_normalize": the default there
        return normalise(rewards.sum(0, keepdim=True))
    total = normalise(rewards).sum(0, keepdim=True)  # "normalize_then_sum": GDPO, arXiv 2601.05242
    return (total - total.mean()) / (total.std() + 1e-4)


def surrogate(current, sampled, rewards, mask, method):
    """One clipped objective for each advantage; GRPO's mean over a completion's tokens, then over completions."""
    ratio = (current - sampled).exp()
    return AffineLoss.clipped_surrogate(
        ratio,
        advantages(rewards, method),
        CLIP,
        mask,
        REWARDS if method == "marble" else None,
        reduction="sequence_mean",
    )


# --- Training ---------------------------------------------------------------------------------------------------------


def train(method, *, seed=0, steps=100, lr=1e-3, floor=0.2, kl=0.0, warm_steps=300):
    """Train one model and say what came of it."""
    torch.manual_seed(seed)
    prompts, held_out = all_prompts()
    model, reference = build_model(), build_model()
    warm_start(model, prompts, warm_steps)
    reference.load_state_dict(model.state_dict())
    before, started = evaluate(model, held_out), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    if method == "marble":
        optimizer = MarbleOptimizer(optimizer, refresh_every=10, floor=floor)
    history, passes = [], []  # mean rewards of each rollout; reverse passes through the model in each optimizer step

    for _ in range(steps):
        batch = prompts[torch.randint(len(prompts), (PROMPTS,))].repeat_interleave(GROUP, 0)
        completions = sample(model, batch)
        mask, rewards = completion_mask(completions), score(batch, completions)
        history.append(rewards.mean(1))
        for epoch in range(EPOCHS):
            current = log_probabilities(model, batch, completions)
            if epoch == 0:
                sampled = current.detach()  # the policy that sampled: the ratio is exactly 1 in the first epoch
            passes.append(0)
            current.register_hook(lambda _: passes.append(passes.pop() + 1))
            losses, penalty = surrogate(current, sampled, rewards, mask, method), None
            if kl:
                with torch.no_grad():
                    apart = log_probabilities(reference, batch, completions)
                apart = apart - current
                penalty = kl * (apart.exp() - apart - 1)[mask].mean()
            optimizer.zero_grad()
            if method == "marble":
                optimizer.backward(losses, regularizer=penalty)
            else:
                (losses.combine([1.0]) + (penalty or 0.0)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    curve = [torch.stack(history[i : i + 5]).mean(0).tolist() for i in range(0, steps, 5)]
    return {
        "method": label(method, floor), "seed": seed, "lr": lr, "steps": steps, "before": before,
        "after": evaluate(model, held_out), "passes": passes, "passes_per_step": round(mean(passes), 3),
        "seconds": round(time.perf_counter() - started),
        "curve": [[round(value, 4) for value in row] for row in curve],  # means of five rollouts
    }  # fmt: skip


def label(method, floor):
    """The method's name in the results."""
    return f"marble, floor {floor}" if method == "marble" else method


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("marble", "sum_then_normalise", "normalise_then_sum"), default="marble")
    parser.add_argument("--floor", type=float, default=0.2, help="marble: the least weight of each reward")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL divergence from the model at the start")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=100, help=f"rollouts, each used {EPOCHS} times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    options = vars(parser.parse_args())
    if options["steps"] < 1:
        parser.error(f"--steps must be at least 1, got {options['steps']}")
    out = options.pop("out")
    result = train(**options)
    print(f"{'held out':>10} {'before':>8} {'after':>8}")
    for name, value in result["before"].items():
        print(f"{name:>10} {value:8.3f} {result['after'][name]:8.3f}")
    print(f"{result['passes_per_step']} reverse passes per optimizer step")
    if out:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
